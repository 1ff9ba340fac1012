// The activations of feed-forward blocks, in float32: each rounds once, as torch's own do.

#pragma once

#include "packed.h"
#include "simd.h"

namespace ISA_NS {

// erf(x) within some units in the last place of one.
// Source: the rational approximation of Eigen's generic_fast_erf, odd and exact to 1 beyond 4.
INLINE F32 error_function(F32 x) {
    x = max(splat(-4.0f), min(splat(4.0f), x));
    const F32 square = mul(x, x);
    F32 p = fma(square, splat(-2.72614225801306e-10f), splat(2.77068142495902e-08f));
    p = fma(square, p, splat(-2.10102402082508e-06f));
    p = fma(square, p, splat(-5.69250639462346e-05f));
    p = fma(square, p, splat(-7.34990630326855e-04f));
    p = fma(square, p, splat(-2.95459980854025e-03f));
    p = fma(square, p, splat(-1.60960333262415e-02f));
    F32 q = fma(square, splat(-1.45660718464996e-05f), splat(-2.13374055278905e-04f));
    q = fma(square, q, splat(-1.68282697438203e-03f));
    q = fma(square, q, splat(-7.37332916720468e-03f));
    q = fma(square, q, splat(-1.42647390514189e-02f));
    return div(mul(x, p), q);
}

// x / (1 + e^-y), which is x times the sigmoid of y.
INLINE F32 times_sigmoid(F32 x, F32 y) {
    return div(x, add(splat(1.0f), exponential(sub(zeros(), y))));
}

// tanh(x): an odd polynomial below 0.625, where 1 - 2 / (1 + e^2x) has lost its digits.
// Source: tanhf in S. L. Moshier's Cephes library.
INLINE F32 hyperbolic_tangent(F32 x) {
    const F32 limit = splat(0.625f), size = absolute(x);
    const F32 near = max(splat(-0.625f), min(limit, x)), square = mul(near, near);
    F32 p = fma(square, splat(-5.70498872745e-3f), splat(2.06390887954e-2f));
    p = fma(square, p, splat(-5.37397155531e-2f));
    p = fma(square, p, splat(1.33314422036e-1f));
    p = fma(square, p, splat(-3.33332819422e-1f));
    const F32 small = fma(mul(p, square), near, near);
    const F32 far =
        sub(splat(1.0f), div(splat(2.0f), add(splat(1.0f), exponential(mul(splat(2.0f), x)))));
    return add(zero_below(size, limit, far), sub(small, zero_below(size, limit, small)));
}

template <Activation A> INLINE F32 activated(F32 x) {
    if constexpr (A == Activation::silu) {
        return times_sigmoid(x, x);
    } else if constexpr (A == Activation::gelu) {
        const F32 half = mul(splat(0.5f), x);
        return fma(half, error_function(mul(x, splat(0.70710678118654752f))), half);
    } else if constexpr (A == Activation::gelu_tanh) {
        const F32 cubed = mul(x, mul(x, x));
        const F32 inner = fma(cubed, splat(0.044715f), x);
        return times_sigmoid(x, mul(inner, splat(2.0f * 0.79788456080286536f)));
    } else if constexpr (A == Activation::quick_gelu) {
        return times_sigmoid(x, mul(x, splat(1.702f)));
    } else if constexpr (A == Activation::tanh) {
        return hyperbolic_tangent(x);
    } else {
        const F32 positive = max(zeros(), x);  // a NaN stays one
        return A == Activation::relu ? positive : mul(positive, positive);
    }
}

// activation(gate) * up, with the roundings of two separate operations on tensors of T; both are
// values of T already, and the result is rounded by the store.
template <Activation A, class T> INLINE F32 gated(F32 gate, F32 up) {
    return mul(rounded<T>(activated<A>(gate)), up);
}

// Call `body` with an activation as a constant.
template <class Body> INLINE auto by_activation(Activation activation, Body &&body) {
    switch (activation) {
        case Activation::silu: return body(std::integral_constant<Activation, Activation::silu>());
        case Activation::gelu: return body(std::integral_constant<Activation, Activation::gelu>());
        case Activation::gelu_tanh:
            return body(std::integral_constant<Activation, Activation::gelu_tanh>());
        case Activation::quick_gelu:
            return body(std::integral_constant<Activation, Activation::quick_gelu>());
        case Activation::relu: return body(std::integral_constant<Activation, Activation::relu>());
        case Activation::relu_squared:
            return body(std::integral_constant<Activation, Activation::relu_squared>());
        default: return body(std::integral_constant<Activation, Activation::tanh>());
    }
}

}  // namespace ISA_NS
