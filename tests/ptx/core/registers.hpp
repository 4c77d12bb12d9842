// Lanes and registers: typed access, types of the tables, the rounding field.
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

[[noreturn]] inline void unsupported(const Insn& i, const char* what) {
  throw Fault("unsupported", std::string(what) + ": opcode " + std::to_string(i.op) + " type " +
                                 std::to_string(i.type));
}
inline Round rounding(const Insn& i) { return static_cast<Round>(i.type2 & 3); }

// -- bits
// ------------------------------------------------------------------------------------------------

inline bool is_wide(int type) {
  return type == T_B64 || type == T_U64 || type == T_S64 || type == T_F64 || type == T_F32X2;
}
inline int width(int type) {
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
inline bool is_signed(int type) {
  return type == T_S8 || type == T_S16 || type == T_S32 || type == T_S64;
}

inline u64 raw(const Warp& w, int slot, int lane, int type) {
  return is_wide(type) ? w.r64(slot)[lane] : w.r32(slot)[lane];
}
inline void put_raw(Warp& w, int slot, int lane, int type, u64 x) {
  if (is_wide(type))
    w.r64(slot)[lane] = x;
  else
    w.r32(slot)[lane] = static_cast<u32>(width(type) == 16 ? x & 0xFFFF : x);
}

inline const Format& format(const Insn& i, int type) {
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
inline bool is_float(int t) { return t == T_F16 || t == T_BF16 || t == T_F32 || t == T_F64; }
}  // namespace ptx
