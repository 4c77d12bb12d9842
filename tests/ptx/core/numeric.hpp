// Floating-point formats and rounding.
//
// Every conversion goes through double: encode(x, format, rounding) for any format of at most 32
// bits. Sums and products that double cannot hold are first rounded to odd (the last bit is set
// when anything was lost), so that the second rounding is still the correct one (Boldo and
// Melquiond, 2008).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace ptx {

using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

enum class Round : int { Nearest, Zero, Down, Up };

// PTX ISA 5.2.3 "Alternate floating-point data formats". `nan` is what a conversion writes for NaN.
struct Format {
  int exponent_bits, mantissa_bits;
  bool ieee;   // has infinities, and NaNs in the top exponent
  u32 nan;     // 0: the format has no NaN
  double max;  // largest finite value
  constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  constexpr int bits() const { return 1 + exponent_bits + mantissa_bits; }
};

inline constexpr Format kF32{8, 23, true, 0x7FFFFFFF, 0x1.FFFFFEp127};
inline constexpr Format kF16{5, 10, true, 0x7FFF, 65504.0};
inline constexpr Format kBF16{8, 7, true, 0x7FFF, 0x1.FEp127};
inline constexpr Format kE5M2{5, 2, true, 0x7F, 57344.0};
inline constexpr Format kE4M3{4, 3, false, 0x7F, 448.0};
inline constexpr Format kE2M3{2, 3, false, 0, 7.5};
inline constexpr Format kE3M2{3, 2, false, 0, 28.0};
inline constexpr Format kE2M1{2, 1, false, 0, 6.0};

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// `finite`: .satfinite, out-of-range values become the largest finite one (PTX ISA 9.7.9.21 "cvt").
inline u32 encode(double x, const Format& f, Round round = Round::Nearest, bool finite = false) {
  const u32 sign = std::signbit(x) ? 1u << (f.bits() - 1) : 0;
  if (std::isnan(x)) return f.nan ? f.nan : encode(f.max, f);
  const double a = std::fabs(x);
  const u32 exponent_max = (1u << f.exponent_bits) - 1;
  const u32 largest =
      f.ieee ? (exponent_max << f.mantissa_bits) - 1
             : (exponent_max << f.mantissa_bits) + ((1u << f.mantissa_bits) - 1) - (f.nan ? 1 : 0);
  const bool away = round == Round::Up ? !sign : round == Round::Down ? sign != 0 : false;
  const auto overflow = [&](bool infinite) -> u32 {
    if (finite || !infinite) return sign | largest;
    return sign | (f.ieee ? exponent_max << f.mantissa_bits : f.nan ? f.nan : largest);
  };
  if (std::isinf(x)) return overflow(true);
  if (a == 0) return sign;
  const int emin = 1 - f.bias();
  int e = std::max(std::ilogb(a), emin);
  const double scaled = std::ldexp(a, f.mantissa_bits - e);  // exact: a power of two
  double n = std::floor(scaled);
  const double rest = scaled - n;
  if (round == Round::Nearest) {
    if (rest > 0.5 || (rest == 0.5 && std::fmod(n, 2.0) != 0)) n += 1;
  } else if (away && rest > 0) {
    n += 1;
  }
  const double value = std::ldexp(n, e - f.mantissa_bits);
  if (value > f.max) return overflow(round == Round::Nearest || away);
  if (n == 0) return sign;
  e = std::max(std::ilogb(value), emin);
  const u32 m = static_cast<u32>(std::ldexp(value, f.mantissa_bits - e));
  const u32 hidden = 1u << f.mantissa_bits;
  if (m < hidden) return sign | m;
  return sign | (static_cast<u32>(e + f.bias()) << f.mantissa_bits) | (m - hidden);
}

inline double decode(u32 bits, const Format& f) {
  const u32 mantissa = bits & ((1u << f.mantissa_bits) - 1);
  const u32 exponent = (bits >> f.mantissa_bits) & ((1u << f.exponent_bits) - 1);
  const bool negative = (bits >> (f.bits() - 1)) & 1;
  double x;
  if (f.ieee && exponent == (1u << f.exponent_bits) - 1) {
    x = mantissa ? std::numeric_limits<double>::quiet_NaN()
                 : std::numeric_limits<double>::infinity();
  } else if (!f.ieee && f.nan && (bits & ((1u << (f.bits() - 1)) - 1)) == f.nan) {
    x = std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    x = std::ldexp(static_cast<double>(mantissa), 1 - f.bias() - f.mantissa_bits);
  } else {
    x = std::ldexp(static_cast<double>(mantissa | (1u << f.mantissa_bits)),
                   static_cast<int>(exponent) - f.bias() - f.mantissa_bits);
  }
  return negative ? -x : x;
}

inline float as_float(u32 bits) { return bit_cast<float>(bits); }
inline u32 as_bits(float x) { return std::isnan(x) ? kF32.nan : bit_cast<u32>(x); }

// UE8M0 (PTX ISA 9.7.9.21): the magnitude's exponent, rounded up (.rp) or down (.rz); 255 is NaN.
inline u32 encode_ue8m0(float x, bool up, bool finite) {
  if (std::isnan(x)) return 255;
  const u32 bits = bit_cast<u32>(x) & 0x7FFFFFFF;
  const u32 exponent = bits >> 23, mantissa = bits & 0x7FFFFF;
  u32 e = exponent;
  // A subnormal above 2^-127 (mantissa 2^22) rounds up to 2^-126; byte 0 is 2^-127.
  if (up) e += exponent ? mantissa != 0 : mantissa > 0x400000;
  if (e > 254) return finite ? 254 : 255;
  return e;
}

inline double decode_ue8m0(u32 byte) {
  return byte == 255 ? std::numeric_limits<double>::quiet_NaN()
                     : std::ldexp(1.0, static_cast<int>(byte) - 127);
}

// a + b rounded to odd. Knuth's two-sum gives the exact error.
inline double add_odd(double a, double b) {
  const double s = a + b;
  if (!std::isfinite(s)) return s;
  const double bb = s - a;
  const double error = (a - (s - bb)) + (b - bb);
  if (error == 0) return s;
  u64 bits = bit_cast<u64>(s);
  if (bits & 1) return s;
  const bool grew = (error < 0) == (s > 0);  // |s| is above the exact sum: truncate first
  if (grew) bits -= 1;
  return bit_cast<double>(bits | 1);
}

inline float flush(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

inline float to_float(double x, Round round) { return as_float(encode(x, kF32, round)); }

inline float add(float a, float b, Round r) {
  return r == Round::Nearest ? a + b : to_float(add_odd(a, b), r);
}

inline float multiply(float a, float b, Round r) {
  return r == Round::Nearest ? a * b : to_float(static_cast<double>(a) * b, r);
}

inline float fused(float a, float b, float c, Round r) {
  if (r == Round::Nearest) return std::fma(a, b, c);
  return to_float(add_odd(static_cast<double>(a) * b, c), r);
}

// min/max (PTX ISA 9.7.3.11-12): a NaN loses to a number unless .NaN; -0 < +0.
inline float maximum(float a, float b, bool propagate) {
  if (std::isnan(a) || std::isnan(b)) {
    if (propagate || (std::isnan(a) && std::isnan(b))) return as_float(kF32.nan);
    return std::isnan(a) ? b : a;
  }
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}

inline float minimum(float a, float b, bool propagate) {
  if (std::isnan(a) || std::isnan(b)) {
    if (propagate || (std::isnan(a) && std::isnan(b))) return as_float(kF32.nan);
    return std::isnan(a) ? b : a;
  }
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}

}  // namespace ptx
