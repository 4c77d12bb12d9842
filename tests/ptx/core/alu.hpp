// Instructions that touch only registers and predicates of one warp (PTX ISA 9.7.1-9.7.9: integer,
// floating-point, half-precision, packed, comparison, logic and shift, data movement and
// conversion).
#pragma once

#include "machine.hpp"

namespace ptx {

template <class T>
inline T get(const Warp& w, int slot, int lane) {
  if constexpr (sizeof(T) == 8) {
    return bit_cast<T>(w.r64(slot)[lane]);
  } else if constexpr (sizeof(T) == 4) {
    return bit_cast<T>(w.r32(slot)[lane]);
  } else {
    return static_cast<T>(w.r32(slot)[lane]);
  }
}

template <class T>
inline void put(Warp& w, int slot, int lane, T value) {
  if constexpr (std::is_same_v<T, float>) {
    w.r32(slot)[lane] = as_bits(value);
  } else if constexpr (sizeof(T) == 8) {
    w.r64(slot)[lane] = bit_cast<u64>(value);
  } else if constexpr (sizeof(T) == 4) {
    w.r32(slot)[lane] = bit_cast<u32>(value);
  } else {
    w.r32(slot)[lane] = static_cast<std::make_unsigned_t<T>>(value);
  }
}

template <class F>
inline void each(u32 mask, F f) {
  if (mask == kAllLanes) {
    for (int lane = 0; lane < kWarpSize; ++lane) f(lane);
  } else {
    for (u32 m = mask; m; m &= m - 1) f(__builtin_ctz(m));
  }
}

class Alu {
 public:
  // False: not an instruction of this unit.
  static bool execute(Warp& w, const Insn& i, u32 mask) {
    switch (i.op) {
      case ADD:
      case SUB:
      case MUL:
      case MAD:
      case FMA:
      case DIV:
      case REM:
      case MIN:
      case MAX:
      case NEG:
      case ABS: arithmetic(w, i, mask); return true;
      case AND:
      case OR:
      case XOR:
      case NOT:
      case SHL:
      case SHR:
      case SHF:
      case LOP3:
      case PRMT:
      case BFE:
      case BFI:
      case BFIND:
      case CLZ:
      case POPC:
      case BREV:
      case COPYSIGN: bits(w, i, mask); return true;
      case MOV:
      case SELP:
      case PACK:
      case UNPACK: move(w, i, mask); return true;
      case SETP:
      case PMOV:
      case PNOT:
      case PAND:
      case POR:
      case PXOR: predicate(w, i, mask); return true;
      case CVT:
      case CVT2:
      case CVT2F: convert(w, i, mask); return true;
      case RCP:
      case SQRT:
      case RSQRT:
      case EX2:
      case LG2:
      case SIN:
      case COS:
      case TANH: function(w, i, mask); return true;
      case CLOCK:
        each(mask, [&](int l) {
          if (i.type == T_U64)
            put<u64>(w, i.a[0], l, w.steps);
          else
            put<u32>(w, i.a[0], l, static_cast<u32>(w.steps));
        });
        return true;
      default: return false;
    }
  }

 private:
  [[noreturn]] static void unsupported(const Insn& i, const char* what) {
    throw Fault("unsupported", std::string(what) + ": opcode " + std::to_string(i.op) + " type " +
                                   std::to_string(i.type));
  }
  static Round rounding(const Insn& i) { return static_cast<Round>(i.type2 & 3); }

  // -- arithmetic
  // ------------------------------------------------------------------------------------------

  template <class T>
  static void integer(Warp& w, const Insn& i, u32 mask) {
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

  static float single(const Insn& i, float a, float b, float c, bool three) {
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
  static u32 half(const Insn& i, const Format& f, u32 x, u32 y, u32 z, bool three) {
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

  static void arithmetic(Warp& w, const Insn& i, u32 mask) {
    const bool three = i.n > 3, two = i.n > 2;
    switch (i.type) {
      case T_U16:
      case T_B16: return integer<u16>(w, i, mask);
      case T_S16: return integer<i16>(w, i, mask);
      case T_U32:
      case T_B32: return integer<u32>(w, i, mask);
      case T_S32: return integer<i32>(w, i, mask);
      case T_U64:
      case T_B64: return integer<u64>(w, i, mask);
      case T_S64: return integer<i64>(w, i, mask);
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

  // -- bits
  // ------------------------------------------------------------------------------------------------

  static bool is_wide(int type) {
    return type == T_B64 || type == T_U64 || type == T_S64 || type == T_F64 || type == T_F32X2;
  }
  static int width(int type) {
    switch (type) {
      case T_B8:
      case T_U8:
      case T_S8: return 8;
      case T_B16:
      case T_U16:
      case T_S16:
      case T_F16:
      case T_BF16: return 16;
      default: return is_wide(type) ? 64 : 32;
    }
  }
  static bool is_signed(int type) {
    return type == T_S8 || type == T_S16 || type == T_S32 || type == T_S64;
  }

  static u64 raw(const Warp& w, int slot, int lane, int type) {
    return is_wide(type) ? w.r64(slot)[lane] : w.r32(slot)[lane];
  }
  static void put_raw(Warp& w, int slot, int lane, int type, u64 x) {
    if (is_wide(type))
      w.r64(slot)[lane] = x;
    else
      w.r32(slot)[lane] = static_cast<u32>(width(type) == 16 ? x & 0xFFFF : x);
  }

  static u32 prmt(u64 bytes, u32 selector) {
    u32 d = 0;
    for (int k = 0; k < 4; ++k) {
      const u32 s = selector >> (4 * k);
      u32 byte = static_cast<u32>(bytes >> (8 * (s & 7))) & 0xFF;
      if (s & 8) byte = byte & 0x80 ? 0xFF : 0;
      d |= byte << (8 * k);
    }
    return d;
  }

  static void bits(Warp& w, const Insn& i, u32 mask) {
    const int t = i.type, n = width(t);
    const auto a = [&](int k, int l) { return raw(w, i.a[k], l, t); };
    const auto out = [&](int l, u64 x) { put_raw(w, i.a[0], l, t, x); };
    const auto c32 = [&](int k, int l) { return w.r32(i.a[k])[l]; };
    switch (i.op) {
      case AND: each(mask, [&](int l) { out(l, a(1, l) & a(2, l)); }); return;
      case OR: each(mask, [&](int l) { out(l, a(1, l) | a(2, l)); }); return;
      case XOR: each(mask, [&](int l) { out(l, a(1, l) ^ a(2, l)); }); return;
      case NOT: each(mask, [&](int l) { out(l, ~a(1, l)); }); return;
      case SHL:  // amounts of the width or more give 0
        each(mask,
             [&](int l) { out(l, c32(2, l) >= static_cast<u32>(n) ? 0 : a(1, l) << c32(2, l)); });
        return;
      case SHR:
        each(mask, [&](int l) {
          const u32 by = std::min(c32(2, l), static_cast<u32>(n));
          if (is_signed(t)) {
            const i64 x = static_cast<i64>(a(1, l) << (64 - n)) >> (64 - n);
            out(l, static_cast<u64>(x >> std::min(by, 63u)));
          } else {
            out(l, by >= 64 ? 0 : a(1, l) >> by);
          }
        });
        return;
      case SHF:
        each(mask, [&](int l) {
          const u64 both = static_cast<u64>(c32(2, l)) << 32 | c32(1, l);
          const u32 by = i.flags & F_WRAP ? c32(3, l) & 31 : std::min(c32(3, l), 32u);
          w.r32(i.a[0])[l] = static_cast<u32>(i.sub == 0 ? both << by >> 32 : both >> by);
        });
        return;
      case LOP3:
        each(mask, [&](int l) {
          const u32 x = c32(1, l), y = c32(2, l), z = c32(3, l), lut = static_cast<u32>(i.a[4]);
          u32 d = 0;
          for (u32 k = 0; k < 8; ++k)
            if (lut >> k & 1) d |= (k & 4 ? x : ~x) & (k & 2 ? y : ~y) & (k & 1 ? z : ~z);
          w.r32(i.a[0])[l] = d;
        });
        return;
      case PRMT:
        each(mask, [&](int l) {
          w.r32(i.a[0])[l] = prmt(static_cast<u64>(c32(2, l)) << 32 | c32(1, l), c32(3, l));
        });
        return;
      case BFE:
        each(mask, [&](int l) {
          const u32 pos = c32(2, l) & 0xFF, len = std::min(c32(3, l) & 0xFF, static_cast<u32>(n));
          const u64 x = n == 64 ? a(1, l) : a(1, l) & 0xFFFFFFFF;
          u64 d = len == 0 || pos >= static_cast<u32>(n) ? 0 : x >> pos;
          if (len < 64) d &= (u64{1} << len) - 1;
          if (is_signed(t) && len) {
            const u32 top = std::min(pos + len - 1, static_cast<u32>(n) - 1);
            if (x >> top & 1) d |= ~u64{0} << std::min(top >= pos ? top - pos : 0, 63u);
          }
          out(l, d);
        });
        return;
      case BFI:
        each(mask, [&](int l) {
          const u32 pos = c32(3, l) & 0xFF, len = c32(4, l) & 0xFF;
          const u64 field = len >= 64 ? ~u64{0} : (u64{1} << len) - 1;
          const u64 m = pos >= static_cast<u32>(n) ? 0 : field << pos;
          out(l, pos >= static_cast<u32>(n) ? a(2, l) : (a(2, l) & ~m) | (a(1, l) << pos & m));
        });
        return;
      case BFIND:
        each(mask, [&](int l) {
          u64 x = n == 64 ? a(1, l) : a(1, l) & 0xFFFFFFFF;
          if (is_signed(t) && x >> (n - 1) & 1) x = ~x & (n == 64 ? ~u64{0} : 0xFFFFFFFF);
          const int top = x ? 63 - __builtin_clzll(x) : -1;
          w.r32(i.a[0])[l] = static_cast<u32>(top < 0                    ? -1
                                              : i.flags & F_SHIFT_AMOUNT ? n - 1 - top
                                                                         : top);
        });
        return;
      case COPYSIGN:  // the sign of a, the rest of b
        each(mask, [&](int l) {
          const u64 sign = u64{1} << (n - 1);
          out(l, (a(1, l) & sign) | (a(2, l) & ~sign));
        });
        return;
      case CLZ:
        each(mask, [&](int l) {
          const u64 x = n == 64 ? a(1, l) : a(1, l) & 0xFFFFFFFF;
          w.r32(i.a[0])[l] = static_cast<u32>(x ? __builtin_clzll(x) - (64 - n) : n);
        });
        return;
      case POPC:
        each(mask, [&](int l) {
          w.r32(i.a[0])[l] =
              static_cast<u32>(__builtin_popcountll(n == 64 ? a(1, l) : a(1, l) & 0xFFFFFFFF));
        });
        return;
      default:  // BREV
        each(mask, [&](int l) {
          u64 x = a(1, l), d = 0;
          for (int k = 0; k < n; ++k, x >>= 1) d = d << 1 | (x & 1);
          out(l, d);
        });
    }
  }

  // -- moves and predicates
  // ----------------------------------------------------------------------------------

  static void move(Warp& w, const Insn& i, u32 mask) {
    switch (i.op) {
      case MOV:
        each(mask, [&](int l) { put_raw(w, i.a[0], l, i.type, raw(w, i.a[1], l, i.type)); });
        return;
      case SELP: {
        const u32 p = w.predicates[static_cast<size_t>(i.a[3])];
        each(mask, [&](int l) {
          put_raw(w, i.a[0], l, i.type, raw(w, i.a[p >> l & 1 ? 1 : 2], l, i.type));
        });
        return;
      }
      case PACK: {
        const int n = i.a[1], bits = width(i.type) / n;
        each(mask, [&](int l) {
          u64 d = 0;
          for (int k = 0; k < n; ++k) {
            const u64 x = w.r32(i.a[2 + k])[l];
            d |= (bits == 32 ? x : x & ((u64{1} << bits) - 1)) << (bits * k);
          }
          put_raw(w, i.a[0], l, i.type, d);
        });
        return;
      }
      default: {  // UNPACK
        const int n = i.a[1], bits = width(i.type) / n;
        each(mask, [&](int l) {
          const u64 x = raw(w, i.a[0], l, i.type);
          for (int k = 0; k < n; ++k)
            if (i.a[2 + k] >= 0)
              w.r32(i.a[2 + k])[l] = static_cast<u32>(
                  x >> (bits * k) & (bits == 32 ? 0xFFFFFFFF : (u64{1} << bits) - 1));
        });
      }
    }
  }

  template <class T>
  static bool ordered(int comparison, T a, T b) {
    switch (comparison) {
      case C_EQ:
      case C_EQU: return a == b;
      case C_NE:
      case C_NEU: return a != b;
      case C_LT:
      case C_LTU: return a < b;
      case C_LE:
      case C_LEU: return a <= b;
      case C_GT:
      case C_GTU: return a > b;
      case C_GE:
      case C_GEU: return a >= b;
      default: return comparison == C_NUM;
    }
  }
  // PTX ISA 9.7.6 "setp": ordered comparisons are false on NaN, those with suffix u true.
  static bool floating(int comparison, double a, double b) {
    if (std::isnan(a) || std::isnan(b)) return comparison >= C_EQU && comparison != C_NUM;
    return ordered(comparison, a, b);
  }

  static bool compare(const Warp& w, const Insn& i, int l) {
    const int a = i.a[2], b = i.a[3];
    switch (i.type) {
      case T_S16: return ordered(i.sub, get<i16>(w, a, l), get<i16>(w, b, l));
      case T_U16:
      case T_B16: return ordered(i.sub, get<u16>(w, a, l), get<u16>(w, b, l));
      case T_S32: return ordered(i.sub, get<i32>(w, a, l), get<i32>(w, b, l));
      case T_U32:
      case T_B32: return ordered(i.sub, get<u32>(w, a, l), get<u32>(w, b, l));
      case T_S64: return ordered(i.sub, get<i64>(w, a, l), get<i64>(w, b, l));
      case T_U64:
      case T_B64: return ordered(i.sub, get<u64>(w, a, l), get<u64>(w, b, l));
      case T_F32: {
        const float x = as_float(w.r32(a)[l]), y = as_float(w.r32(b)[l]);
        return i.flags & F_FTZ ? floating(i.sub, flush(x), flush(y)) : floating(i.sub, x, y);
      }
      case T_F64: return floating(i.sub, get<double>(w, a, l), get<double>(w, b, l));
      case T_F16:
      case T_BF16: {
        const Format& f = i.type == T_F16 ? kF16 : kBF16;
        return floating(i.sub, decode(w.r32(a)[l] & 0xFFFF, f), decode(w.r32(b)[l] & 0xFFFF, f));
      }
      default: unsupported(i, "setp");
    }
  }

  static void predicate(Warp& w, const Insn& i, u32 mask) {
    const auto p = [&](int k) -> u32& { return w.predicates[static_cast<size_t>(i.a[k])]; };
    const auto write = [&](int k, u32 x) { p(k) = (p(k) & ~mask) | (x & mask); };
    switch (i.op) {
      case PMOV: write(0, p(1)); return;
      case PNOT: write(0, ~p(1)); return;
      case PAND: write(0, p(1) & p(2)); return;
      case POR: write(0, p(1) | p(2)); return;
      case PXOR: write(0, p(1) ^ p(2)); return;
      default: break;
    }
    u32 result = 0;
    each(mask, [&](int l) { result |= static_cast<u32>(compare(w, i, l)) << l; });
    u32 negated = ~result;
    if (i.a[4] >= 0) {
      const u32 c = i.flags & F_NEGATE_COMBINE ? ~p(4) : p(4);
      const auto combine = [&](u32 x) {
        return i.flags & F_COMBINE_OR ? x | c : i.flags & F_COMBINE_XOR ? x ^ c : x & c;
      };
      result = combine(result);
      negated = combine(negated);
    }
    write(0, result);
    if (i.a[1] >= 0) write(1, negated);
  }

  // -- conversions (PTX ISA 9.7.9.21 "cvt")
  // ------------------------------------------------------------------

  static const Format& format(const Insn& i, int type) {
    switch (type) {
      case T_F32: return kF32;
      case T_F16:
      case T_F16X2: return kF16;
      case T_BF16:
      case T_BF16X2: return kBF16;
      case T_E4M3:
      case T_E4M3X2: return kE4M3;
      case T_E5M2:
      case T_E5M2X2: return kE5M2;
      default: unsupported(i, "cvt");
    }
  }
  static bool is_float(int t) { return t == T_F16 || t == T_BF16 || t == T_F32 || t == T_F64; }

  // Integers are carried as 64 bits, sign- or zero-extended from their type.
  static u64 integer_source(const Warp& w, int slot, int l, int type, bool wide) {
    const u64 x = wide ? w.r64(slot)[l] : w.r32(slot)[l];
    const int n = width(type);
    if (n == 64)
      return wide              ? x
             : is_signed(type) ? static_cast<u64>(static_cast<i64>(static_cast<i32>(x)))
                               : x;
    const u64 cut = x & ((u64{1} << n) - 1);
    return is_signed(type) && cut >> (n - 1) ? cut | ~u64{0} << n : cut;
  }

  static void convert(Warp& w, const Insn& i, u32 mask) {
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

  static double integral(double x, Round round) {
    switch (round) {
      case Round::Nearest: return std::nearbyint(x);
      case Round::Zero: return std::trunc(x);
      case Round::Down: return std::floor(x);
      default: return std::ceil(x);
    }
  }
  static u64 saturate(u64 x, bool from_signed, int to) {
    const int n = width(to);
    const __int128 v =
        from_signed ? static_cast<__int128>(static_cast<i64>(x)) : static_cast<__int128>(x);
    const __int128 low = is_signed(to) ? -(static_cast<__int128>(1) << (n - 1)) : 0;
    const __int128 high = (static_cast<__int128>(1) << (is_signed(to) ? n - 1 : n)) - 1;
    return static_cast<u64>(std::min(std::max(v, low), high));
  }

  // -- functions
  // ---------------------------------------------------------------------------------------------

  // .approx results are the correctly rounded ones, inside the error that PTX ISA 9.7.3 allows
  // (ex2: 2 ulp, rcp and rsqrt: 1 to 2 ulp, lg2: 2^-22).
  static void function(Warp& w, const Insn& i, u32 mask) {
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
};

}  // namespace ptx
