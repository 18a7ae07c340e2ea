/*
 * rawecho: what two processes can do at best over TCP, with one connection and
 * non-blocking sockets. raw.h says how it is driven.
 *
 *   cc -O2 -Wall -Wextra -o rawecho rawecho.c
 *   ./rawecho CLIENT_CORE SERVER_CORE [ADDRESS]
 *
 * ADDRESS is an IPv4 address of this host (default 127.0.0.1).
 */
#define _GNU_SOURCE
#define NAME "rawecho"
#include "raw.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

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

int main(int argc, char **argv) {
  const char *address = argc > 3 ? argv[3] : "127.0.0.1";
  struct sockaddr_in addr = {.sin_family = AF_INET};
  socklen_t len = sizeof addr;
  if (argc < 3 || argc > 4 || inet_pton(AF_INET, address, &addr.sin_addr) != 1)
    die("want CLIENT_CORE SERVER_CORE [ADDRESS]");
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
