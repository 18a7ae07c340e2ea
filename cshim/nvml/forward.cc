// The functions of the library of the GPU driver (NVML) that the engine leaves undefined, for
// programs in C and C++. The engine opens NVML where there is one and calls them by name. Here each
// is a jump to what the dynamic linker finds under that name at the first call. So the archive is
// linked without options, and the shared library can be loaded with immediate binding (dlopen with
// RTLD_NOW), which refuses undefined functions. A function that is not there returns
// NVML_ERROR_FUNCTION_NOT_FOUND.
//
// FORWARDED is a file with a line FORWARD(name) for each; tools/builder.py writes it.
#include <dlfcn.h>

namespace {

struct Function {
  void *address; // nullptr: not looked for yet, or not found
  const char *name;
};

int not_found() { return 13; }

} // namespace

extern "C" __attribute__((visibility("hidden"), used)) void *
fs_forward_find(Function *f) {
  void *address = dlsym(RTLD_DEFAULT, f->name);
  if (!address)
    return reinterpret_cast<void *>(&not_found);
  __atomic_store_n(&f->address, address, __ATOMIC_RELEASE);
  return address;
}

// Each function is a record (Function) and code that jumps to its address. fs_forward_slow keeps
// the registers of the arguments; no function of NVML takes floating point ones.
#define RECORD(name)                                                           \
  ".section .rodata.str1.1,\"aMS\",%progbits,1\n"                              \
  "1: .string \"" #name "\"\n"                                                 \
  ".data\n.balign 8\n"                                                         \
  "2: .quad 0, 1b\n"                                                           \
  ".text\n.globl " #name "\n.hidden " #name "\n"                               \
  ".type " #name ",%function\n" #name ":\n"

#if defined(__x86_64__)

#define FORWARD(name)                                                          \
  __asm__(RECORD(name) "lea 2b(%rip), %r10\n"                                  \
                       "mov (%r10), %r11\n"                                    \
                       "test %r11, %r11\n"                                     \
                       "je fs_forward_slow\n"                                  \
                       "jmp *%r11\n");

__asm__(".text\n"
        "fs_forward_slow:\n"
        "push %rdi\npush %rsi\npush %rdx\npush %rcx\npush %r8\npush %r9\n"
        "sub $8, %rsp\n" // calls keep the stack aligned to 16 bytes
        "mov %r10, %rdi\n"
        "call fs_forward_find\n"
        "mov %rax, %r11\n"
        "add $8, %rsp\n"
        "pop %r9\npop %r8\npop %rcx\npop %rdx\npop %rsi\npop %rdi\n"
        "jmp *%r11\n");

#elif defined(__aarch64__)

#define FORWARD(name)                                                          \
  __asm__(RECORD(name) "adrp x16, 2b\n"                                        \
                       "add x16, x16, :lo12:2b\n"                              \
                       "ldr x17, [x16]\n"                                      \
                       "cbz x17, 3f\n"                                         \
                       "br x17\n"                                              \
                       "3: b fs_forward_slow\n");

__asm__(".text\n"
        "fs_forward_slow:\n"
        "stp x0, x1, [sp, #-80]!\nstp x2, x3, [sp, #16]\n"
        "stp x4, x5, [sp, #32]\nstp x6, x7, [sp, #48]\nstp x8, x30, [sp, #64]\n"
        "mov x0, x16\n"
        "bl fs_forward_find\n"
        "mov x17, x0\n"
        "ldp x2, x3, [sp, #16]\nldp x4, x5, [sp, #32]\n"
        "ldp x6, x7, [sp, #48]\nldp x8, x30, [sp, #64]\nldp x0, x1, [sp], #80\n"
        "br x17\n");

#endif

#include FORWARDED
