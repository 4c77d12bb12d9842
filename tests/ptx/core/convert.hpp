// Conversions (PTX ISA 9.7.9.21 "cvt").
#pragma once

#include "registers.hpp"

namespace ptx {

inline double integral(double x, Round round) {
  switch (round) {
    case Round::Nearest: return std::nearbyint(x);
    case Round::Zero: return std::trunc(x);
    case Round::Down: return std::floor(x);
    default: return std::ceil(x);
  }
}
inline u64 saturate(u64 x, bool from_signed, int to) {
  const int n = width(to);
  const __int128 v =
      from_signed ? static_cast<__int128>(static_cast<i64>(x)) : static_cast<__int128>(x);
  const __int128 low = is_signed(to) ? -(static_cast<__int128>(1) << (n - 1)) : 0;
  const __int128 high = (static_cast<__int128>(1) << (is_signed(to) ? n - 1 : n)) - 1;
  return static_cast<u64>(std::min(std::max(v, low), high));
}

// Integers are carried as 64 bits, sign- or zero-extended from their type.
inline u64 integer_source(const Warp& w, int slot, int l, int type, bool wide) {
  const u64 x = wide ? w.r64(slot)[l] : w.r32(slot)[l];
  const int n = width(type);
  if (n == 64)
    return wide ? x : is_signed(type) ? static_cast<u64>(static_cast<i64>(static_cast<i32>(x))) : x;
  const u64 cut = x & ((u64{1} << n) - 1);
  return is_signed(type) && cut >> (n - 1) ? cut | ~u64{0} << n : cut;
}

inline void execute_convert(Warp& w, const Insn& i, u32 mask) {
  const int to = i.type, from = i.type2;
  const Round round = static_cast<Round>(i.sub & 3);
  const bool finite = i.flags & F_FINITE;
  if (i.op == CVT2) {
    each(mask, [&](int l) {
      float x[2] = {as_float(w.r32(i.a[2])[l]), as_float(w.r32(i.a[1])[l])};  // b is the low part
      u32 d = 0;
      const int bits = to == T_F16X2 || to == T_BF16X2 ? 16 : 8;
      for (int h = 0; h < 2; ++h) {
        u32 part;
        if (to == T_UE8M0X2) {
          part = encode_ue8m0(x[h], round == Round::Up, finite);
        } else {
          if ((i.flags & F_RELU) && !(x[h] > 0) && !std::isnan(x[h])) x[h] = 0;
          part = encode(x[h], format(i, to), round, finite);
        }
        d |= part << (bits * h);
      }
      w.r32(i.a[0])[l] = d;
    });
    return;
  }
  if (i.op == CVT2F) {
    const auto narrow = [](int type) { return type != T_F16X2 && type != T_BF16X2; };
    const int from_bits = narrow(from) ? 8 : 16, to_bits = narrow(to) ? 8 : 16;
    each(mask, [&](int l) {
      const u32 x = w.r32(i.a[1])[l];
      u32 d = 0;
      for (int h = 0; h < 2; ++h) {
        const u32 part = x >> (from_bits * h) & ((1u << from_bits) - 1);
        const double v = from == T_UE8M0X2 ? decode_ue8m0(part) : decode(part, format(i, from));
        const u32 code = to == T_UE8M0X2
                             ? encode_ue8m0(static_cast<float>(v), round == Round::Up, finite)
                             : encode(v, format(i, to), round, finite);
        d |= code << (to_bits * h);
      }
      w.r32(i.a[0])[l] = d;
    });
    return;
  }
  const bool from_wide = i.a[2] != 0, to_wide = i.a[3] != 0;
  each(mask, [&](int l) {
    const auto store = [&](u64 x) {
      if (to_wide)
        w.r64(i.a[0])[l] = x;
      else
        w.r32(i.a[0])[l] = static_cast<u32>(x);
    };
    if (!is_float(from) && !is_float(to)) {
      u64 x = integer_source(w, i.a[1], l, from, from_wide);
      const int n = width(to);
      if (i.flags & F_SAT) x = saturate(x, is_signed(from), to);
      // A register wider than the type receives it sign- or zero-extended.
      if (n < 64) {
        x &= (u64{1} << n) - 1;
        if (is_signed(to) && x >> (n - 1)) x |= ~u64{0} << n;
      }
      if (!to_wide && n <= 16 && !i.a[4]) x &= 0xFFFF;
      store(x);
      return;
    }
    if (is_float(from) && is_float(to)) {
      double x = from == T_F64   ? get<double>(w, i.a[1], l)
                 : from == T_F32 ? as_float(w.r32(i.a[1])[l])
                                 : decode(w.r32(i.a[1])[l] & 0xFFFF, format(i, from));
      if ((i.flags & F_FTZ) && from == T_F32) x = flush(static_cast<float>(x));
      if (i.flags & F_INTEGER_ROUND) x = integral(x, round);
      if ((i.flags & F_RELU) && !(x > 0) && !std::isnan(x)) x = 0;
      if (i.flags & F_SAT) x = std::isnan(x) ? 0.0 : std::min(std::max(x, 0.0), 1.0);
      if (to == T_F64)
        store(bit_cast<u64>(x));
      else
        store(encode(x, format(i, to), round, finite));
      return;
    }
    if (is_float(to)) {
      const u64 x = integer_source(w, i.a[1], l, from, from_wide);
      if (to == T_F32 && width(from) == 64 && round == Round::Nearest) {
        store(as_bits(is_signed(from) ? static_cast<float>(static_cast<i64>(x))
                                      : static_cast<float>(x)));
        return;
      }
      const double v =
          is_signed(from) ? static_cast<double>(static_cast<i64>(x)) : static_cast<double>(x);
      if (to == T_F64)
        store(bit_cast<u64>(v));
      else
        store(encode(v, format(i, to), round));
      return;
    }
    // Float to integer: rounded, then clamped to the range; NaN gives 0 for narrow types and, for
    // 32 and 64 bits, the values of the PTX ISA ("cvt": NaN converts to 0 except f32/f64 sources
    // on 64-bit: 0x8000...).
    double x = from == T_F64   ? get<double>(w, i.a[1], l)
               : from == T_F32 ? as_float(w.r32(i.a[1])[l])
                               : decode(w.r32(i.a[1])[l] & 0xFFFF, format(i, from));
    if ((i.flags & F_FTZ) && from == T_F32) x = flush(static_cast<float>(x));
    const int n = width(to);
    if (std::isnan(x)) {
      store(n == 64 ? u64{1} << 63 : 0);
      return;
    }
    x = integral(x, round);
    const double low = is_signed(to) ? -std::ldexp(1.0, n - 1) : 0,
                 high = std::ldexp(1.0, is_signed(to) ? n - 1 : n);
    u64 r;
    if (x < low)
      r = is_signed(to) ? ~u64{0} << (n - 1) : 0;
    else if (x >= high)
      r = is_signed(to) ? (u64{1} << (n - 1)) - 1 : n == 64 ? ~u64{0} : (u64{1} << n) - 1;
    else
      r = is_signed(to) ? static_cast<u64>(static_cast<i64>(x)) : static_cast<u64>(x);
    store(r);
  });
}

}  // namespace ptx
