// Integer and floating-point arithmetic and functions (PTX ISA 9.7.1-9.7.5).
#pragma once

#include "registers.hpp"

namespace ptx {

template <class T>
inline void execute_integer(Warp& w, const Insn& i, u32 mask) {
  using U = std::make_unsigned_t<T>;
  using Wide =
      std::conditional_t<sizeof(T) == 8,
                         std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
                         std::conditional_t<std::is_signed_v<T>, i64, u64>>;
  const auto a = [&](int l) { return get<T>(w, i.a[1], l); };
  const auto b = [&](int l) { return get<T>(w, i.a[2], l); };
  const auto wrap = [&](int l, U x) { put<T>(w, i.a[0], l, static_cast<T>(x)); };
  switch (i.op) {
    case ADD:
      each(mask,
           [&](int l) { wrap(l, static_cast<U>(static_cast<U>(a(l)) + static_cast<U>(b(l)))); });
      return;
    case SUB:
      each(mask,
           [&](int l) { wrap(l, static_cast<U>(static_cast<U>(a(l)) - static_cast<U>(b(l)))); });
      return;
    case NEG:
      each(mask, [&](int l) { wrap(l, static_cast<U>(U{0} - static_cast<U>(a(l)))); });
      return;
    case ABS:
      each(mask, [&](int l) {
        wrap(l, a(l) < T{0} ? static_cast<U>(U{0} - static_cast<U>(a(l))) : static_cast<U>(a(l)));
      });
      return;
    case MIN: each(mask, [&](int l) { put<T>(w, i.a[0], l, std::min(a(l), b(l))); }); return;
    case MAX: each(mask, [&](int l) { put<T>(w, i.a[0], l, std::max(a(l), b(l))); }); return;
    case MUL:
    case MAD: {
      each(mask, [&](int l) {
        const Wide p = static_cast<Wide>(a(l)) * static_cast<Wide>(b(l));
        if (i.sub == 2) {  // wide: the result is twice as long
          if constexpr (sizeof(T) == 2) {
            using D = std::conditional_t<std::is_signed_v<T>, i32, u32>;
            D d = static_cast<D>(p);
            if (i.op == MAD) d = static_cast<D>(static_cast<u32>(d) + get<u32>(w, i.a[3], l));
            put<D>(w, i.a[0], l, d);
          } else if constexpr (sizeof(T) == 4) {
            u64 d = static_cast<u64>(p);
            if (i.op == MAD) d += get<u64>(w, i.a[3], l);
            put<u64>(w, i.a[0], l, d);
          } else {
            unsupported(i, "mul.wide of 64 bits");
          }
          return;
        }
        U d = static_cast<U>(i.sub == 1 ? p >> (8 * sizeof(T)) : p);
        if (i.op == MAD) d = static_cast<U>(d + static_cast<U>(get<T>(w, i.a[3], l)));
        wrap(l, d);
      });
      return;
    }
    case DIV:
    case REM:
      each(mask, [&](int l) {
        const T x = a(l), y = b(l);
        if (y == 0) throw Fault("arithmetic", "integer division by zero");
        if constexpr (std::is_signed_v<T>) {
          if (y == T{-1}) {  // the most negative value divided by -1 wraps
            put<T>(w, i.a[0], l, i.op == DIV ? static_cast<T>(U{0} - static_cast<U>(x)) : T{0});
            return;
          }
        }
        put<T>(w, i.a[0], l, static_cast<T>(i.op == DIV ? x / y : x % y));
      });
      return;
    default: unsupported(i, "integer arithmetic");
  }
}

inline float single(const Insn& i, float a, float b, float c, bool three) {
  const Round r = rounding(i);
  if (i.flags & F_FTZ) a = flush(a), b = flush(b), c = flush(c);
  float d;
  switch (i.op) {
    case ADD: d = add(a, b, r); break;
    case SUB: d = add(a, -b, r); break;
    case MUL: d = multiply(a, b, r); break;
    case FMA:
    case MAD: d = fused(a, b, c, r); break;
    case DIV: d = r == Round::Nearest ? a / b : to_float(static_cast<double>(a) / b, r); break;
    case MIN:
      d = minimum(a, b, i.flags & F_NAN);
      if (three) d = minimum(d, c, i.flags & F_NAN);
      break;
    case MAX:
      d = maximum(a, b, i.flags & F_NAN);
      if (three) d = maximum(d, c, i.flags & F_NAN);
      break;
    case NEG: d = -a; break;
    case ABS: d = std::fabs(a); break;
    default: unsupported(i, "f32 arithmetic");
  }
  if (i.flags & F_FTZ) d = flush(d);
  if (i.flags & F_SAT) d = std::isnan(d) ? 0.0f : std::min(std::max(d, 0.0f), 1.0f);
  return d;
}

// 16-bit floats: one rounding from a sum or product rounded to odd.
inline u32 half(const Insn& i, const Format& f, u32 x, u32 y, u32 z, bool three) {
  const double a = decode(x, f), b = decode(y, f), c = decode(z, f);
  const u32 sign = 1u << (f.bits() - 1);
  double d;
  switch (i.op) {
    case ADD: d = add_odd(a, b); break;
    case SUB: d = add_odd(a, -b); break;
    case MUL: d = a * b; break;
    case FMA: d = add_odd(a * b, c); break;
    case MIN:
      d = minimum(static_cast<float>(a), static_cast<float>(b), i.flags & F_NAN);
      if (three) d = minimum(static_cast<float>(d), static_cast<float>(c), i.flags & F_NAN);
      break;
    case MAX:
      d = maximum(static_cast<float>(a), static_cast<float>(b), i.flags & F_NAN);
      if (three) d = maximum(static_cast<float>(d), static_cast<float>(c), i.flags & F_NAN);
      break;
    case NEG: return std::isnan(a) ? f.nan : x ^ sign;
    case ABS: return std::isnan(a) ? f.nan : x & ~sign;
    default: unsupported(i, "16-bit float arithmetic");
  }
  if ((i.flags & F_RELU) && !(d > 0)) d = std::isnan(d) ? d : 0.0;
  if (i.flags & F_SAT) d = std::isnan(d) ? 0.0 : std::min(std::max(d, 0.0), 1.0);
  return encode(d, f);
}

inline void execute_arithmetic(Warp& w, const Insn& i, u32 mask) {
  const bool three = i.n > 3, two = i.n > 2;
  switch (i.type) {
    case T_U16:
    case T_B16: return execute_integer<u16>(w, i, mask);
    case T_S16: return execute_integer<i16>(w, i, mask);
    case T_U32:
    case T_B32: return execute_integer<u32>(w, i, mask);
    case T_S32: return execute_integer<i32>(w, i, mask);
    case T_U64:
    case T_B64: return execute_integer<u64>(w, i, mask);
    case T_S64: return execute_integer<i64>(w, i, mask);
    case T_F32:
      each(mask, [&](int l) {
        // Mixed precision (PTX ISA 9.7.5): `sub` names the 16-bit type of a (and of b, for fma).
        const auto source = [&](int k, bool narrow) {
          const u32 x = w.r32(i.a[k])[l];
          if (!narrow || !i.sub) return as_float(x);
          return static_cast<float>(decode(x & 0xFFFF, i.sub == T_BF16 ? kBF16 : kF16));
        };
        const bool neg_is_bits = i.op == NEG || i.op == ABS;
        if (neg_is_bits && !(i.flags & F_FTZ)) {
          const u32 x = w.r32(i.a[1])[l];
          const u32 sign = 0x80000000;
          w.r32(i.a[0])[l] = std::isnan(as_float(x)) ? kF32.nan
                             : i.op == NEG           ? x ^ sign
                                                     : x & ~sign;
          return;
        }
        const float a = source(1, true), b = two ? source(2, i.op == FMA) : 0,
                    c = three ? source(3, false) : 0;
        put<float>(w, i.a[0], l, single(i, a, b, c, three));
      });
      return;
    case T_F32X2:
      each(mask, [&](int l) {
        u64 d = 0;
        for (int h = 0; h < 2; ++h) {
          const auto part = [&](int k) {
            return as_float(static_cast<u32>(w.r64(i.a[k])[l] >> (32 * h)));
          };
          const float x = single(i, part(1), two ? part(2) : 0, three ? part(3) : 0, three);
          d |= static_cast<u64>(as_bits(x)) << (32 * h);
        }
        w.r64(i.a[0])[l] = d;
      });
      return;
    case T_F64:
      each(mask, [&](int l) {
        const auto s = [&](int k) { return get<double>(w, i.a[k], l); };
        double d;
        switch (i.op) {
          case ADD: d = s(1) + s(2); break;
          case SUB: d = s(1) - s(2); break;
          case MUL: d = s(1) * s(2); break;
          case DIV: d = s(1) / s(2); break;
          case FMA: d = std::fma(s(1), s(2), s(3)); break;
          case MIN: d = std::fmin(s(1), s(2)); break;
          case MAX: d = std::fmax(s(1), s(2)); break;
          case NEG: d = -s(1); break;
          case ABS: d = std::fabs(s(1)); break;
          default: unsupported(i, "f64 arithmetic");
        }
        put<double>(w, i.a[0], l, d);
      });
      return;
    case T_F16:
    case T_BF16:
    case T_F16X2:
    case T_BF16X2: {
      const Format& f = i.type == T_F16 || i.type == T_F16X2 ? kF16 : kBF16;
      const int parts = i.type == T_F16X2 || i.type == T_BF16X2 ? 2 : 1;
      each(mask, [&](int l) {
        u32 d = 0;
        for (int h = 0; h < parts; ++h) {
          const auto part = [&](int k) { return (w.r32(i.a[k])[l] >> (16 * h)) & 0xFFFF; };
          d |= half(i, f, part(1), two ? part(2) : 0, three ? part(3) : 0, three) << (16 * h);
        }
        w.r32(i.a[0])[l] = d;
      });
      return;
    }
    default: unsupported(i, "arithmetic");
  }
}

// -- functions
// ---------------------------------------------------------------------------------------------

// .approx results are the correctly rounded ones, inside the error that PTX ISA 9.7.3 allows
// (ex2: 2 ulp, rcp and rsqrt: 1 to 2 ulp, lg2: 2^-22).
inline void execute_function(Warp& w, const Insn& i, u32 mask) {
  each(mask, [&](int l) {
    const auto value = [&](double x) {
      switch (i.op) {
        case RCP: return 1.0 / x;
        case SQRT: return std::sqrt(x);
        case RSQRT: return 1.0 / std::sqrt(x);
        case EX2: return std::exp2(x);
        case LG2: return std::log2(x);
        case SIN: return std::sin(x);
        case COS: return std::cos(x);
        default: return std::tanh(x);
      }
    };
    if (i.type == T_F32) {
      float x = as_float(w.r32(i.a[1])[l]);
      if (i.flags & F_FTZ) x = flush(x);
      float d = to_float(value(x), rounding(i));
      if (i.flags & F_FTZ) d = flush(d);
      put<float>(w, i.a[0], l, d);
    } else if (i.type == T_F64) {
      put<double>(w, i.a[0], l, value(get<double>(w, i.a[1], l)));
    } else {
      const Format& f = format(i, i.type);
      const int parts = i.type == T_F16X2 || i.type == T_BF16X2 ? 2 : 1;
      u32 d = 0;
      for (int h = 0; h < parts; ++h)
        d |= encode(value(decode(w.r32(i.a[1])[l] >> (16 * h) & 0xFFFF, f)), f) << (16 * h);
      w.r32(i.a[0])[l] = d;
    }
  });
}

}  // namespace ptx
