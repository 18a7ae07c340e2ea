/*
 * rawecho: what two processes can do at best over TCP, with one connection and
 * non-blocking sockets. raw.h says how it is driven.
 *
 *   cc -O2 -Wall -Wextra -o rawecho rawecho.c
 *   ./rawecho CLIENT_CORE SERVER_CORE [ADDRESS]
 *   ./rawecho listen ADDRESS
 *   ./rawecho connect HOST PORT CORE
 *
 * ADDRESS is an address of this host (of the first form an IPv4 address; default
 * 127.0.0.1). The other forms are one end each, for two hosts. The one that
 * listens takes any free port, and prints it. It serves one client, which has to
 * show the token that is in RAWECHO_TOKEN on both hosts; whoever else connects is
 * sent away. A server ends with its client, or its parent.
 */
#define _GNU_SOURCE
#define NAME "rawecho"
#include "raw.h"
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#ifndef CONNECT_S
#define CONNECT_S 10 /* until a client is connected and has shown its token */
#endif
#define GONE_S 20 /* after which a silent host is gone */

/* After a try that moved nothing: goes on spinning, or ends the process. */
static void retry(const char *what) {
  if (errno != EAGAIN && errno != EINTR)
    die("%s: %s", what, strerror(errno));
  if (yielding)
    sched_yield();
}

static void send_all(int fd, const void *data, size_t size) {
  const char *p = data;
  while (size > 0) {
    ssize_t n = send(fd, p, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0) {
      retry("send");
      continue;
    }
    p += n;
    size -= (size_t)n;
  }
}

/* Returns 0 if the peer closed before the first byte. The first try waits if
 * blocking is set; all others spin. */
static int recv_all(int fd, void *data, size_t size, int blocking) {
  char *p = data;
  size_t left = size;
  while (left > 0) {
    ssize_t n = recv(fd, p, left, blocking ? 0 : MSG_DONTWAIT);
    if (n < 0) {
      retry("receive");
      continue;
    }
    if (n == 0) {
      if (left == size)
        return 0;
      die("receive: the peer closed %zu bytes early", left);
    }
    p += n;
    left -= (size_t)n;
    blocking = 0;
  }
  return 1;
}

static void serve(int fd) {
  struct buffer in = {0}, reply = {0};
  struct round r;
  while (recv_all(fd, &r, sizeof r, 1)) {
    reserve(&in, r.out);
    reserve(&reply, r.back);
    send_all(fd, "", 1);
    for (uint64_t i = 0; i < r.iters; i++) {
      if (!recv_all(fd, in.data, r.out, 0))
        exit(1); /* the client said why */
      check(in.data, r.out, i);
      if (r.back == r.out) { /* an echo */
        send_all(fd, in.data, r.back);
      } else {
        stamp(reply.data, r.back, i);
        send_all(fd, reply.data, r.back);
      }
    }
  }
}

static void play(int fd) {
  struct buffer out = {0}, back = {0}, times = {0};
  struct round r;
  uint64_t warmup;
  char ready;
  while (next_round(&r, &warmup)) {
    uint64_t n = r.iters - warmup;
    reserve(&out, r.out);
    reserve(&back, r.back);
    reserve(&times, n * sizeof(uint64_t));
    uint64_t *ns = (uint64_t *)(void *)times.data;
    send_all(fd, &r, sizeof r);
    if (!recv_all(fd, &ready, 1, 1))
      die("the server is gone");
    for (uint64_t i = 0; i < r.iters; i++) {
      stamp(out.data, r.out, i);
      uint64_t start = now();
      send_all(fd, out.data, r.out);
      if (!recv_all(fd, back.data, r.back, 0))
        die("the server is gone");
      uint64_t end = now();
      check(back.data, r.back, i);
      if (i >= warmup)
        ns[i - warmup] = end - start;
    }
    answer(ns, n);
  }
}

/* Where BBR is the default it paces, also inside a host, and takes twice as
 * long for 1 MiB. */
static void tune(int fd) {
  int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

/* Has what waits on a socket fail after so many seconds; 0: never. */
static void limit(int fd, long seconds) {
  struct timeval t = {.tv_sec = seconds};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t);
}

/* Has a connection end if the other host is gone. */
static void keep(int fd) {
  int on = 1, each = GONE_S / 4, probes = 3, most = GONE_S * 1000;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &each, sizeof each);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &each, sizeof each);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &most, sizeof most);
}

static const char *token(void) {
  const char *found = getenv("RAWECHO_TOKEN");
  if (found == NULL || *found == '\0')
    die("RAWECHO_TOKEN: want the token of both hosts");
  return found;
}

/* Returns a new socket, and the address of that name and port. */
static int resolve(const char *host, const char *port, struct addrinfo **at) {
  struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
  int rc = getaddrinfo(host, port, &hints, at);
  if (rc != 0)
    die("%s: %s", host, gai_strerror(rc));
  int fd = socket((*at)->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0)
    die("socket: %s", strerror(errno));
  return fd;
}

/* Reports whether the client sends the token. */
static int knows(int fd, const char *want) {
  char got[256] = {0};
  size_t n = strlen(want);
  unsigned char wrong = n > sizeof got;
  limit(fd, 1); /* what it has to say has few bytes */
  if (wrong || recv(fd, got, n, 0) != (ssize_t)n)
    return 0;
  for (size_t i = 0; i < n; i++) /* all, so that the time tells nothing */
    wrong |= (unsigned char)(got[i] ^ want[i]);
  return !wrong;
}

/* Returns the connection of the one client, and listens no more. */
static int take(const char *address) {
  const char *want = token();
  struct addrinfo *at;
  int listener = resolve(address, "0", &at), fd = -1;
  char port[NI_MAXSERV];
  if (bind(listener, at->ai_addr, at->ai_addrlen) != 0 ||
      getsockname(listener, at->ai_addr, &at->ai_addrlen) != 0 ||
      listen(listener, 16) != 0)
    die("cannot listen on %s: %s", address, strerror(errno));
  getnameinfo(at->ai_addr, at->ai_addrlen, NULL, 0, port, sizeof port,
              NI_NUMERICSERV);
  puts(port);
  fflush(stdout);
  uint64_t end = now() + CONNECT_S * UINT64_C(1000000000);
  while (fd < 0) {
    int64_t left = (int64_t)(end - now()) / 1000000;
    struct pollfd ready = {.fd = listener, .events = POLLIN};
    if (left <= 0 || poll(&ready, 1, (int)left) == 0)
      die("no client with the token has connected within %d s", CONNECT_S);
    fd = accept(listener, NULL, NULL);
    if (fd >= 0 && (!knows(fd, want) || send(fd, "!", 1, MSG_NOSIGNAL) != 1)) {
      close(fd);
      fd = -1;
    }
  }
  close(listener);
  freeaddrinfo(at);
  return fd;
}

/* Returns a connection to the end that listens. */
static int reach(const char *host, const char *port) {
  const char *mine = token();
  struct addrinfo *at;
  int fd = resolve(host, port, &at);
  char accepted = 0;
  limit(fd, CONNECT_S);
  if (connect(fd, at->ai_addr, at->ai_addrlen) != 0)
    die("cannot connect to port %s of %s: %s (it is any free port: open all "
        "ports to this host, or use --no-baseline)",
        port, host, strerror(errno == EINPROGRESS ? ETIMEDOUT : errno));
  send(fd, mine, strlen(mine), MSG_NOSIGNAL);
  if (recv(fd, &accepted, 1, 0) != 1 || accepted != '!')
    die("port %s of %s did not accept the token (check whether another program "
        "accepts the connections, or use --no-baseline)",
        port, host);
  freeaddrinfo(at);
  return fd;
}

/* One end of two hosts. */
static int far_end(int fd, int serving, int core) {
  limit(fd, 0);
  keep(fd);
  tune(fd);
  pin(core);
  if (serving)
    serve(fd);
  else
    play(fd);
  return 0;
}

int main(int argc, char **argv) {
  const char *address = argc > 3 ? argv[3] : "127.0.0.1";
  struct sockaddr_in addr = {.sin_family = AF_INET};
  socklen_t len = sizeof addr;
  if (argc == 3 && strcmp(argv[1], "listen") == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    return far_end(take(argv[2]), 1, -1);
  }
  if (argc == 5 && strcmp(argv[1], "connect") == 0)
    return far_end(reach(argv[2], argv[3]), 0, atoi(argv[4]));
  if (argc < 3 || argc > 4 || inet_pton(AF_INET, address, &addr.sin_addr) != 1)
    die("want CLIENT_CORE SERVER_CORE [ADDRESS], listen ADDRESS, or "
        "connect HOST PORT CORE");
  int client_core = atoi(argv[1]), server_core = atoi(argv[2]);
  yielding = client_core >= 0 && client_core == server_core;

  int listener = socket(AF_INET, SOCK_STREAM, 0);
  if (listener < 0 || bind(listener, (struct sockaddr *)&addr, len) != 0 ||
      getsockname(listener, (struct sockaddr *)&addr, &len) != 0 ||
      listen(listener, 1) != 0)
    die("listen on %s: %s", address, strerror(errno));
  int client = socket(AF_INET, SOCK_STREAM, 0);
  if (client < 0 || connect(client, (struct sockaddr *)&addr, len) != 0)
    die("connect to %s: %s", address, strerror(errno));
  int server = accept(listener, NULL, NULL);
  if (server < 0)
    die("accept: %s", strerror(errno));
  close(listener);
  tune(client);
  tune(server);

  if (split() == 0) {
    close(client);
    pin(server_core);
    serve(server);
    return 0;
  }
  close(server);
  pin(client_core);
  play(client);
  return 0;
}
