// gcov writes what it has counted when a process calls exit. Most processes of the tests call _exit. tools/coverage.sh
// builds this file twice: into the extension, with -DEXTENSION, and as a library to preload, whose _exit has the
// extension write first.

#ifdef EXTENSION

void __gcov_dump(void); // of libgcov

__attribute__((weak)) void at_fast_exit(void (*write)(void)); // of the library

__attribute__((constructor)) static void tell(void) {
  if (at_fast_exit)
    at_fast_exit(__gcov_dump);
}

#else

#include <sys/syscall.h>
#include <unistd.h>

static void (*write_counts)(void);

void at_fast_exit(void (*write)(void)) { write_counts = write; }

void _exit(int status) {
  if (write_counts)
    write_counts();
  for (;;)
    syscall(SYS_exit_group, status);
}

#endif
