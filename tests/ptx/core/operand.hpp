// Matrix operands in shared memory: descriptors and addresses (PTX ISA 9.7.15.5.1 for
// wgmma, 9.7.16.3-4 for tcgen05), and the product itself.
#pragma once

#include <map>

#include "copies.hpp"

namespace ptx {

struct Descriptor {
  u32 start, leading, stride;
  int swizzle;  // as TensorMap::swizzle
};

inline Descriptor decode_descriptor(u64 v, bool sm100) {
  Descriptor d{};
  d.start = static_cast<u32>(v & 0x3FFF) << 4;
  d.leading = static_cast<u32>(v >> 16 & 0x3FFF) << 4;
  d.stride = static_cast<u32>(v >> 32 & 0x3FFF) << 4;
  const auto refuse = [&](const char* what) {
    throw Fault("unsupported", "matrix descriptor " + hex(v) + ": " + what);
  };
  if (v >> 49 & 7) refuse("a base offset");
  if (sm100) {
    if ((v >> 46 & 7) != 1) refuse("bits 46-48 are not 1");
    if (v >> 52 & 0x1FF) refuse("bits 52-60 are not 0");
    switch (v >> 61) {
      case 0: d.swizzle = 0; break;
      case 2: d.swizzle = 3; break;
      case 4: d.swizzle = 2; break;
      case 6: d.swizzle = 1; break;
      default: refuse("its layout type");
    }
  } else {
    static const int layouts[] = {0, 3, 2, 1};
    d.swizzle = layouts[v >> 62];
  }
  return d;
}

// The 16-byte chunk that holds `chunk` (of k when K-major, of mn otherwise) of line `line`.
inline u32 chunk_address(const Descriptor& d, bool k_major, u32 line, u32 chunk) {
  const u32 span = 1u << d.swizzle;  // chunks in one swizzle row
  u32 c;
  if (k_major) {  // line is mn, chunk runs along k
    c = (line % 8) * 16 * span + line / 8 * d.stride + chunk * (d.swizzle ? 16 : d.leading);
  } else if (d.swizzle) {  // line is k, chunk runs along mn
    c = chunk % span * 16 + chunk / span * d.leading + line % 8 * 16 * span + line / 8 * d.stride;
  } else {
    c = line % 8 * 16 + chunk * d.stride + line / 8 * d.leading;
  }
  return swizzle(d.start + c, d.swizzle);
}

inline double decode_element(u32 bits, int type) {
  switch (type) {
    case T_BF16: return as_float(bits << 16);
    case T_F16: return decode(bits, kF16);
    case T_E4M3: return decode(bits, kE4M3);
    case T_E5M2: return decode(bits, kE5M2);
    case T_TF32: return as_float(bits & 0xFFFFE000);
    default: throw Fault("unsupported", "element type of a matrix operand");
  }
}

inline int element_bytes(int type) {
  return type == T_BF16 || type == T_F16 ? 2 : type == T_TF32 ? 4 : 1;
}

// rows x K values, row-major, each with the exponent that hardware adds: that of its leading bit,
// or of its format's subnormals. K is 32 bytes of elements.
struct Matrix {
  static constexpr int kZero = -100000;
  int rows, depth;
  std::vector<double> x;
  std::vector<int> exponent;
  Matrix(int r, int k)
      : rows(r), depth(k), x(static_cast<size_t>(r * k)), exponent(static_cast<size_t>(r * k)) {}
  size_t index(int r, int k) const { return static_cast<size_t>(r * depth + k); }
  double& at(int r, int k) { return x[index(r, k)]; }

  void set(int r, int k, u32 bits, int type) {
    const double v = decode_element(bits, type);
    static const std::map<int, int> least = {
        {T_BF16, -126}, {T_TF32, -126}, {T_F16, -14}, {T_E4M3, -6}, {T_E5M2, -14}};
    x[index(r, k)] = v;
    exponent[index(r, k)] = v == 0 ? kZero : std::max(std::ilogb(v), least.at(type));
  }
  void scale(int r, u32 ue8m0) {
    const double f = decode_ue8m0(ue8m0);
    for (int k = 0; k < depth; ++k) {
      x[index(r, k)] *= f;
      if (exponent[index(r, k)] != kZero) exponent[index(r, k)] += static_cast<int>(ue8m0) - 127;
    }
  }
  Matrix transposed() const {
    Matrix t(depth, rows);
    for (int r = 0; r < rows; ++r)
      for (int k = 0; k < depth; ++k) {
        t.x[t.index(k, r)] = x[index(r, k)];
        t.exponent[t.index(k, r)] = exponent[index(r, k)];
      }
    return t;
  }
};

// Rows [first, first + rows); `first` is a multiple of 16.
inline Matrix load_operand(SharedMemory& shared, u64 descriptor, bool sm100, bool k_major, int type,
                           int rows, const Access& by, int first = 0) {
  const Descriptor d = decode_descriptor(descriptor, sm100);
  const int bytes = element_bytes(type), per_chunk = 16 / bytes, depth = 32 / bytes;
  Matrix m(rows, depth);
  const int lines = k_major ? rows : depth, chunks = (k_major ? depth : rows) / per_chunk;
  const bool partial = !k_major && rows % per_chunk;
  for (int line = 0; line < lines; ++line)
    for (int chunk = 0; chunk < chunks + partial; ++chunk) {
      const int n = partial && chunk == chunks ? rows % per_chunk : per_chunk;
      const int at_line = line + (k_major ? first : 0);
      const int at_chunk = chunk + (k_major ? 0 : first / per_chunk);
      const u8* p = shared.read(
          chunk_address(d, k_major, static_cast<u32>(at_line), static_cast<u32>(at_chunk)),
          static_cast<u32>(n * bytes), by);
      for (int e = 0; e < n; ++e) {
        u32 bits = 0;
        std::memcpy(&bits, p + e * bytes, static_cast<size_t>(bytes));
        const int along = chunk * per_chunk + e;
        k_major ? m.set(line, along, bits, type) : m.set(along, line, bits, type);
      }
    }
  return m;
}

// How a matrix unit rounds. Exact: products and their sum in double, rounded once. Truncated: what
// MMA-Sim (README, "Numerics") measured: every term is shifted to the largest exponent and cut at
// `kept` fraction bits, the sum is cut at `output` bits.
struct Numerics {
  bool truncated = false;
  int kept = 25, output = 23;
};

inline Numerics numerics(const Machine& m, bool hopper_fp8) {
  if (!m.launch.truncate) return {};
  return hopper_fp8 ? Numerics{true, 13, 13} : Numerics{true, 25, 23};
}

// acc[n] += sum over k of a(row, k) * b(k, n).
inline void accumulate(const Matrix& a, int row, const Matrix& b, double* acc,
                       const Numerics& how) {
  const int columns = b.depth;
  const double* x = a.x.data() + a.index(row, 0);
  if (!how.truncated) {
    for (int k = 0; k < a.depth; ++k) {
      const double* y = b.x.data() + b.index(k, 0);
      for (int n = 0; n < columns; ++n) acc[n] += x[k] * y[n];
    }
    return;
  }
  const int* ex = a.exponent.data() + a.index(row, 0);
  for (int n = 0; n < columns; ++n) {
    double plain = acc[n];
    int top = acc[n] == 0 ? Matrix::kZero : std::max(std::ilogb(acc[n]), -126);
    for (int k = 0; k < a.depth; ++k) {
      plain += x[k] * b.x[b.index(k, n)];
      const int ey = b.exponent[b.index(k, n)];
      if (ex[k] != Matrix::kZero && ey != Matrix::kZero) top = std::max(top, ex[k] + ey);
    }
    if (!std::isfinite(plain) || top == Matrix::kZero) {
      acc[n] = plain;
      continue;
    }
    const double up = std::ldexp(1.0, how.kept - top);
    double sum = std::trunc(acc[n] * up);
    for (int k = 0; k < a.depth; ++k) sum += std::trunc(x[k] * b.x[b.index(k, n)] * up);
    sum /= up;
    if (sum != 0) {
      const double cut = std::ldexp(1.0, how.output - std::max(std::ilogb(sum), -126));
      sum = std::trunc(sum * cut) / cut;
    }
    acc[n] = sum;
  }
}

}  // namespace ptx
