// What tools/wheel_cxx.sh links into each library of a wheel: functions and
// variables that the headers of this host's g++ use, and that came later than the
// oldest libraries that a wheel runs with.

extern "C" {
// glibc 2.32: whether this process has one thread, which only makes reference
// counts faster.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

#ifdef ADAPTER // It runs with the C++ library of GCC 8. The linker makes all of
               // this local to it.
#include <exception>
#include <new>
#include <sstream>

// GCC 9 and 11: constructors without arguments, and str() of temporaries.
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;

// GCC 11: how pointers to exceptions are counted, by what counted them before.
extern "C" {
void copy_pointer(void *, const void *) __asm__(
    "_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void end_pointer(void *) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
void add_reference(const void *p) __asm__(
    "_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void release(void **p) __asm__(
    "_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");

void add_reference(const void *p) {
  void *never_ended;
  copy_pointer(&never_ended, p);
}
void release(void **p) {
  end_pointer(p);
  *p = nullptr;
}
}

// GCC 11: what `new` of too many elements throws.
namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
} // namespace std
#endif
