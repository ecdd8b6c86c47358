// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Coroutines with stacks of their own, for machine.hpp. On x86-64 by swapping stacks in place (5 ns), elsewhere by ucontext (a hundred times
// that: system calls for the signal mask). AddressSanitizer is told of each switch.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <new>
#if !defined(__x86_64__) && !defined(OUTRIDER_EMULATION_UCONTEXT)
#define OUTRIDER_EMULATION_UCONTEXT 1
#endif
#if defined(OUTRIDER_EMULATION_UCONTEXT)
#include <ucontext.h>
#endif
#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace outrider::cuda_emulation {

#if defined(OUTRIDER_EMULATION_UCONTEXT)
using context_type = ucontext_t;
inline void swap(context_type& save, context_type& load) { swapcontext(&save, &load); }
#else
using context_type = void*;  // the stack pointer; the rest lies on the stack
// Saves the callee-saved registers on the old stack, its pointer in *save; goes on at the other. Weak: the header may be in several objects.
// Fibers mostly wait in one place (hand_over() of machine.hpp), so the return goes where the processor expects it.
extern "C" void outrider_emulation_swap(void** save, void* load);
asm(R"(
.pushsection .text
.weak outrider_emulation_swap
.type outrider_emulation_swap, @function
outrider_emulation_swap:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size outrider_emulation_swap, . - outrider_emulation_swap
.popsection
)");
inline void swap(context_type& save, context_type& load) { outrider_emulation_swap(&save, load); }
#endif

class fiber {
 public:
  /// The next switch to this fiber calls entry, which must never return. Whatever the fiber was doing is forgotten.
  void start(void (*entry)(), unsigned number) {
    if (!bottom_) {  // lives as long as the process; a guard page below catches overflow
      void* memory = mmap(nullptr, guard_bytes + stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED || mprotect(memory, guard_bytes, PROT_NONE) != 0) throw std::bad_alloc();
      bottom_ = static_cast<std::byte*>(memory) + guard_bytes, size_ = stack_bytes;
    }
    auto* const stack = static_cast<std::byte*>(const_cast<void*>(bottom_));
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack, stack_bytes);
    asan_ = nullptr;
#endif
    entry_ = entry;
    const std::size_t size = stack_bytes - number % 61 * 320;  // tops in different cache sets
#if defined(OUTRIDER_EMULATION_UCONTEXT)
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack, context_.uc_stack.ss_size = size, context_.uc_link = nullptr;
    makecontext(&context_, &first, 0);
#else
    void** top = reinterpret_cast<void**>(stack + size) - 8;  // six registers, the entry, one word of alignment
    std::fill(top, top + 8, nullptr);
    top[6] = reinterpret_cast<void*>(&first);
    context_ = top;
#endif
  }
  [[nodiscard]] bool started() const { return entry_ != nullptr; }

  /// From the running fiber to another; returns when somebody switches back.
  static void switch_to(fiber& next) {
    fiber& self = *running;
    left = &self, running = &next;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&self.asan_, next.bottom_, next.size_);
#endif
    swap(self.context_, next.context_);
    arrive(self.asan_);
  }
  /// The stack of the OS thread itself.
  static fiber& scheduler();

 private:
  static constexpr std::size_t stack_bytes = 128 * 1024, guard_bytes = 4096;
  static void arrive([[maybe_unused]] void* asan) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(asan, &left->bottom_, &left->size_);  // so the bounds of the scheduler's stack become known
#endif
  }
  static void first() {
    arrive(nullptr);
    running->entry_();
  }

  context_type context_{};
  const void* bottom_ = nullptr;
  std::size_t size_ = 0;
  void (*entry_)() = nullptr;
  void* asan_ = nullptr;

  static fiber os_thread;
  static inline fiber* running = &os_thread;
  static inline fiber* left = nullptr;
};
inline fiber fiber::os_thread;
inline fiber& fiber::scheduler() { return os_thread; }

}  // namespace outrider::cuda_emulation
