/* What it takes to start a timer and to stop it: one that ends before all others of the core, and one that does not. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <sys/timerfd.h>
#include <time.h>

enum { COUNT = 200000 };

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

int main(void) {
  const struct itimerspec stop = {0};
  const struct timespec after[] = {{0, 50000}, {1000, 0}};
  const int fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(1, &one);
  if (fd < 0 || sched_setaffinity(0, sizeof one, &one) != 0)
    return 1;
  for (int i = 0; i < 6; i++) {
    const struct itimerspec start = {.it_value = after[i / 3]};
    const double begin = now();
    for (int n = 0; n < COUNT; n++) {
      timerfd_settime(fd, 0, &start, NULL);
      timerfd_settime(fd, 0, &stop, NULL);
    }
    printf("%ld.%05ld s: %.0f ns\n", (long)start.it_value.tv_sec, start.it_value.tv_nsec / 10000, (now() - begin) / COUNT);
  }
  return 0;
}
