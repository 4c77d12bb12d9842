// Logic, shifts, bit fields, moves, comparisons and predicates (PTX ISA 9.7.1, 9.7.6-9.7.9).
#pragma once

#include "registers.hpp"

namespace ptx {

inline u32 prmt(u64 bytes, u32 selector) {
  u32 d = 0;
  for (int k = 0; k < 4; ++k) {
    const u32 s = selector >> (4 * k);
    u32 byte = static_cast<u32>(bytes >> (8 * (s & 7))) & 0xFF;
    if (s & 8) byte = byte & 0x80 ? 0xFF : 0;
    d |= byte << (8 * k);
  }
  return d;
}

inline void execute_bits(Warp& w, const Insn& i, u32 mask) {
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

inline void execute_move(Warp& w, const Insn& i, u32 mask) {
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
inline bool ordered(int comparison, T a, T b) {
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
inline bool floating(int comparison, double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return comparison >= C_EQU && comparison != C_NUM;
  return ordered(comparison, a, b);
}

inline bool compare(const Warp& w, const Insn& i, int l) {
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

inline void execute_predicate(Warp& w, const Insn& i, u32 mask) {
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

}  // namespace ptx
