// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <concepts>
#include <string_view>

#include "outrider/core/space.hpp"
#include "outrider/core/view.hpp"

namespace outrider {

/// How a program wants its ops to run. Every backend's context is constructible from it.
struct execution {
  unsigned threads = 0;  // 0 = one per core the process may use
};

/// What a backend is, besides its ops. A backend is an empty tag type; specialise this for it:
///   using space     = where its tensors live (host_space, device_space)
///   using context   = what its ops run with (threads, a stream); explicitly constructible from `execution`, passed to every op by reference.
///                     One context serves one thread of the program at a time; `unsigned threads() const noexcept` says how many it uses.
///   static std::string_view name() noexcept               "highway"
///   static std::string_view simd() noexcept               what the ops run on: "AVX2", "scalar"
/// and, if quantised weights shall be rearranged in groups and multiplied by int8 activations unless a program asks for something else:
///   static constexpr bool int8_products = true
/// A backend whose space is not the host's has two more members in its context:
///   void wait()                             returns when all ops asked for are done; throws what went wrong with them
///   std::span<token_id> exchange() noexcept a few ids, at least 64, in memory that both sides reach: the host puts ids there for ops to read, or
///                                           waits for those that ops have put
/// A backend that changes a few ops of another one inherits all specialisations and overrides those.
template <class Backend>
struct backend_traits;

/// What a backend's traits name, and views into its memory.
template <class Backend>
using space_of = typename backend_traits<Backend>::space;
template <class Backend>
using context_of = typename backend_traits<Backend>::context;

template <class T, class Backend>
using matrix_for = matrix_view<T, space_of<Backend>>;
template <class W, class Backend>
using weight_for = weight_view<W, space_of<Backend>>;

template <class Backend>
inline constexpr bool prefers_int8_products = false;
template <class Backend>
  requires requires { backend_traits<Backend>::int8_products; }
inline constexpr bool prefers_int8_products<Backend> = backend_traits<Backend>::int8_products;

/// A tag with a complete backend_traits specialisation.
template <class B>
concept backend_tag = requires(const context_of<B>& ctx) {
  typename space_of<B>;
  requires std::constructible_from<context_of<B>, execution>;
  { backend_traits<B>::name() } -> std::convertible_to<std::string_view>;
  { backend_traits<B>::simd() } -> std::convertible_to<std::string_view>;
  { ctx.threads() } -> std::convertible_to<unsigned>;
};

}  // namespace outrider
