// tcgen05 (PTX ISA 9.7.16): tensor memory, its loads and stores, copies from shared memory, MMA and
// commit.
//
// MMA, cp and commit of one warp complete in program order (9.7.16.6.2 promises mma->mma, cp->mma,
// mma->commit; the order mma->cp is not promised, but NVIDIA's own block-scaled GEMMs rely on it).
// Loads take their data at wait::ld or when a destination register is first touched; stores act at
// wait::st. All three can also complete earlier, as the schedule decides.
#pragma once

#include "operand.hpp"

namespace ptx {

inline void use_group(Cta& cta, int group, const char* what) {
  if (cta.tensor_group && cta.tensor_group != group)
    throw Fault("protocol",
                std::string(what) + ".cta_group::" + std::to_string(group) +
                    " in a kernel that has used cta_group::" + std::to_string(cta.tensor_group));
  if (group == 2 && cta.cluster->ctas.size() % 2)
    throw Fault("protocol",
                std::string(what) + ".cta_group::2 in a cluster of an odd number of CTAs");
  cta.tensor_group = group;
}

inline int tensor_allocate(Warp& w, int columns, int group) {
  Cta& cta = *w.cta;
  use_group(cta, group, "tcgen05.alloc");
  if (columns < 32 || columns > 512 || (columns & (columns - 1)))
    throw Fault("protocol", "tcgen05.alloc of " + std::to_string(columns) + " columns");
  if (cta.relinquished) throw Fault("protocol", "tcgen05.alloc after relinquish_alloc_permit");
  return cta.tensor->allocate(columns);
}

// Lane (relative to the first) and column of register i of thread t (9.7.16.8.1).
inline std::pair<int, int> tensor_cell(int shape, int t, int i) {
  switch (shape) {
    case LD_32x32b: return {t, i};
    case LD_16x64b: return {t / 4 + 8 * (t % 2), t / 2 % 2 + 2 * i};
    case LD_16x128b: return {t / 4 + 8 * (i % 2), t % 4 + 4 * (i / 2)};
    default: return {t / 4 + 8 * (i / 2 % 2), 2 * (t % 4) + i % 2 + 8 * (i / 4)};
  }
}
inline int tensor_columns(int shape, int registers) {
  switch (shape) {
    case LD_32x32b: return registers;
    case LD_16x64b: return 2 * registers;
    case LD_16x128b: return 2 * registers;
    default: return 2 * registers;
  }
}

struct TensorTransfer : AsyncOp {
  Machine* m;
  Warp* w;
  int shape, count, lane, column;
  u32 epoch;
  Knowledge knows;
  std::vector<int> slots;  // registers of a load
  std::vector<u32> data;   // of a store: count x 32

  int quarter() const { return w->index % 4; }
  int first() const { return 32 * quarter() + lane % 32; }
  void check_lanes() const {
    if (lane % 32 != 0 && (shape == LD_32x32b || lane % 32 != 16))
      throw Fault("bounds", describe() + " starts at lane " + std::to_string(lane));
  }
  Access access(WarpAgent role, const char* what) const {
    return {m->cluster->agents.get(), &knows, agent_of(*w, role), epoch, false, what};
  }
  std::string describe() const override {
    return std::string(slots.empty() ? "tcgen05.st" : "tcgen05.ld") + " of CTA " +
           std::to_string(w->cta->rank) + " warp " + std::to_string(w->index);
  }
};

struct TensorLoad : TensorTransfer {
  int reduction = 0, type = T_B32, flags = 0, reduced = -1;  // tcgen05.ld.red

  u32 combine(u32 a, u32 b) const {
    if (type == T_F32) {
      const bool nan = flags & F_NAN;
      const float x = as_float(a), y = as_float(b);
      return as_bits(reduction == 1 ? minimum(x, y, nan) : maximum(x, y, nan));
    }
    const bool less = type == T_S32 ? static_cast<i32>(a) < static_cast<i32>(b) : a < b;
    return less == (reduction == 1) ? a : b;
  }

  bool step() override {
    check_lanes();
    TensorMemory& t = *w->cta->tensor;
    for (int c = 0; c < tensor_columns(shape, count); ++c)
      t.read(quarter(), column + c, access(kTmemLoad, "tcgen05.ld"));
    for (int l = 0; l < kWarpSize; ++l)
      for (int i = 0; i < count; ++i) {
        const auto [row, col] = tensor_cell(shape, l, i);
        const u32 x = t.get(first() + row, column + col, "tcgen05.ld");
        if (slots[static_cast<size_t>(i)] >= 0) w->r32(slots[static_cast<size_t>(i)])[l] = x;
        if (reduction == 0) continue;
        const u32 part = flags & F_ABS ? x & 0x7FFFFFFF : x;
        u32& r = w->r32(reduced)[l];
        r = i == 0 ? part : combine(r, part);
      }
    if (reduction) slots.push_back(reduced);
    for (const int s : slots)
      if (s >= 0 && w->busy[static_cast<size_t>(s)]) {
        w->busy[static_cast<size_t>(s)] = kFree;
        --w->busy_count;
      }
    w->knows.all.raise(agent_of(*w, kTmemLoad), epoch);
    m->work["tcgen05.ld bytes"] += static_cast<u64>(count * kWarpSize * 4);
    return true;
  }
};

struct TensorStore : TensorTransfer {
  bool step() override {
    check_lanes();
    TensorMemory& t = *w->cta->tensor;
    for (int c = 0; c < tensor_columns(shape, count); ++c)
      t.write(quarter(), column + c, access(kTmemStore, "tcgen05.st"));
    for (int l = 0; l < kWarpSize; ++l)
      for (int i = 0; i < count; ++i) {
        const auto [row, col] = tensor_cell(shape, l, i);
        t.set(first() + row, column + col, data[static_cast<size_t>(i * kWarpSize + l)]);
      }
    m->work["tcgen05.st bytes"] += static_cast<u64>(count * kWarpSize * 4);
    return true;
  }
};

// What MMA, cp and commit share: the issuing warp and what it knew.
struct TensorOp : AsyncOp {
  Machine* m;
  Warp* w;
  int group;
  Knowledge knows;

  Cta& cta(int v) const {
    return group == 1 ? *w->cta : *m->cluster->ctas[static_cast<size_t>((w->cta->rank & ~1) + v)];
  }
  Access access(bool async, const char* what) const {
    return {m->cluster->agents.get(), &knows, m->cluster->agents->tensor(w->cta->rank),
            w->cta->tensor_epoch,     async,  what};
  }
};

struct TensorCommit : TensorOp {
  u32 offset, targets;  // bit r: CTA r of the cluster
  bool step() override {
    ++w->cta->tensor_epoch;
    // Completion of the warp's earlier operations, and through them whatever they waited for.
    knows.all.raise(m->cluster->agents->tensor(w->cta->rank), w->cta->tensor_epoch);
    for (u32 t = targets; t; t &= t - 1) {
      const auto rank = static_cast<u32>(__builtin_ctz(t));
      if (rank < m->cluster->ctas.size() && m->cluster->ctas[rank]->live_warps == 0) {
        m->remark("tcgen05.commit arrives at CTA " + std::to_string(rank) + " after it has exited");
        continue;
      }
      Cta& target = cta_at(*m, rank, "tcgen05.commit");
      if (&target != w->cta)
        target.visitors[m->cluster->agents->tensor(w->cta->rank)] = w->cta->tensor_epoch;
      mbarrier_arrive(*m, target, offset, 1, knows, "tcgen05.commit");
    }
    return true;
  }
  std::string describe() const override {
    return "tcgen05.commit to " + w->cta->shared->place(offset);
  }
};

// 9.7.16.9 "tcgen05.cp": rows of 16-byte chunks, as a K-major operand without transposition.
struct TensorCopy : TensorOp {
  int shape, column;
  u64 descriptor;
  bool step() override {
    ++w->cta->tensor_epoch;
    const Descriptor d = decode_descriptor(descriptor, true);
    int rows = 32, chunks = 1;
    switch (shape) {
      case CP_32x128b_warpx4: break;
      case CP_128x256b:
        rows = 128;
        chunks = 2;
        break;
      case CP_128x128b: rows = 128; break;
      case CP_64x128b_02_13:
      case CP_64x128b_01_23: rows = 64; break;
      default: rows = 4; chunks = 2;
    }
    for (int v = 0; v < group; ++v) {
      Cta& c = cta(v);
      const Access read = access(true, "tcgen05.cp"), write = access(false, "tcgen05.cp");
      for (int q = 0; q < 4; ++q)
        for (int k = 0; k < 4 * chunks; ++k) c.tensor->write(q, column + k, write);
      for (int r = 0; r < rows; ++r)
        for (int j = 0; j < chunks; ++j) {
          const u8* p = c.shared->read(
              chunk_address(d, true, static_cast<u32>(r), static_cast<u32>(j)), 16, read);
          u32 x[4];
          std::memcpy(x, p, 16);
          for (int k = 0; k < 4; ++k)
            for (const int lane : lanes(r))
              if (lane >= 0) c.tensor->set(lane, column + 4 * j + k, x[k]);
        }
    }
    m->work["tcgen05.cp bytes"] += static_cast<u64>(rows * chunks * 16 * group);
    return true;
  }
  std::array<int, 4> lanes(int r) const {
    switch (shape) {
      case CP_32x128b_warpx4: return {r, r + 32, r + 64, r + 96};
      case CP_64x128b_02_13: return {r, r + 64, -1, -1};
      case CP_64x128b_01_23: return {r % 32 + 64 * (r / 32), r % 32 + 64 * (r / 32) + 32, -1, -1};
      case CP_4x256b: return {32 * r, -1, -1, -1};
      default: return {r, -1, -1, -1};
    }
  }
  std::string describe() const override { return "tcgen05.cp to column " + std::to_string(column); }
};

// 9.7.16.10 "tcgen05.mma": D = A*B + D; instruction descriptor of 9.7.16.4.2.
struct TensorMma : TensorOp {
  int kind, column, lane, a_column, a_lane, sfa, sfb;
  bool a_in_tensor, enable;
  u64 a, b;
  u32 idesc;
  std::array<u32, 8> disabled{};

  struct Shape {
    int m, n, type_a, type_b, type_d;
    bool negate_a, negate_b, mn_a, mn_b;
    int sfa_byte, sfb_byte;
  };

  Shape shape() const {
    const auto field = [&](int at, int n) {
      return static_cast<int>(idesc >> at & ((1u << n) - 1));
    };
    const auto refuse = [&](const std::string& what) {
      throw Fault("unsupported", "instruction descriptor " + hex(idesc) + ": " + what);
    };
    Shape s{};
    s.m = kind == K_MXF8F6F4 ? 128 * field(27, 2) : 16 * field(24, 5);
    s.n = 8 * field(17, 6);
    s.negate_a = field(13, 1);
    s.negate_b = field(14, 1);
    s.mn_a = field(15, 1);
    s.mn_b = field(16, 1);
    if (field(2, 1)) refuse("sparse operands");
    const auto type = [&](int code) {
      if (kind == K_F16 && code < 2) return code ? T_BF16 : T_F16;
      if (kind == K_TF32 && code == 2) return T_TF32;
      if ((kind == K_F8F6F4 || kind == K_MXF8F6F4) && code < 2) return code ? T_E5M2 : T_E4M3;
      refuse("operand type " + std::to_string(code));
      return T_B8;
    };
    s.type_a = type(field(7, 3));
    s.type_b = type(field(10, 3));
    s.type_d = T_F32;
    if (kind == K_MXF8F6F4) {
      if (!field(23, 1)) refuse("scales that are not UE8M0");
      s.sfb_byte = field(4, 2);
      s.sfa_byte = field(29, 2);
    } else if (field(4, 2) == 0) {
      s.type_d = T_F16;
    } else if (field(4, 2) != 1) {
      refuse("accumulator type");
    }
    if (lane % 32 && (s.m / group != 64 || lane % 32 != 16))
      refuse("D starts at lane " + std::to_string(lane));
    if (a_in_tensor && a_lane % 32 && (s.m / group != 64 || a_lane % 32 != 16))
      refuse("A starts at lane " + std::to_string(a_lane));
    const int step = group == 2 ? 16 : 8;
    const bool m_fits = kind == K_MXF8F6F4 ? s.m == 128 * group
                        : group == 1       ? s.m == 64 || s.m == 128
                                           : s.m == 128 || s.m == 256;
    if (!m_fits || s.n < step || s.n > 256 || s.n % step)
      throw Fault("protocol",
                  "tcgen05.mma of M " + std::to_string(s.m) + ", N " + std::to_string(s.n));
    return s;
  }

  // Where row r of CTA v and column n of D are.
  std::pair<int, int> d_cell(const Shape& s, int r, int n) const {
    const int rows = s.m / group;
    if (rows == 128) return {r, n};
    if (group == 1) return {lane % 32 + r % 16 + 32 * (r / 16), n};
    return {r + 64 * (n / (s.n / 2)), n % (s.n / 2)};
  }

  Matrix load_a(const Shape& s, int v) const {
    const int rows = s.m / group;
    if (!a_in_tensor)
      return load_operand(*cta(v).shared, a, true, !s.mn_a, s.type_a, rows,
                          access(true, "tcgen05.mma (A)"));
    if (s.mn_a) throw Fault("protocol", "tcgen05.mma: A in tensor memory must be K-major");
    const int bytes = element_bytes(s.type_a), per_cell = 4 / bytes, depth = 32 / bytes;
    TensorMemory& t = *cta(v).tensor;
    for (int q = 0; q < 4; ++q)
      for (int c = 0; c < 8; ++c) t.read(q, a_column + c, access(false, "tcgen05.mma (A)"));
    Matrix x(rows, depth);
    for (int r = 0; r < rows; ++r) {
      const int at = rows == 128 || group == 2 ? r : a_lane % 32 + r % 16 + 32 * (r / 16);
      for (int k = 0; k < depth; ++k) {
        const u32 cell = t.get(at, a_column + k / per_cell, "tcgen05.mma (A)");
        const u32 bits =
            bytes == 4 ? cell : cell >> (8 * bytes * (k % per_cell)) & ((1u << (8 * bytes)) - 1);
        x.set(r, k, bits, s.type_a);
      }
    }
    return x;
  }

  // 9.7.16.10.7: one scale byte for each row and 32 of k, the same in all four groups of 32 lanes.
  u32 scale(TensorMemory& t, int base, int row, int byte, const char* what) const {
    const u32 cell = t.get(row % 32, base + row / 32, what);
    const u32 value = cell >> (8 * byte) & 0xFF;
    for (int q = 1; q < 4; ++q)
      if ((t.get(row % 32 + 32 * q, base + row / 32, what) >> (8 * byte) & 0xFF) != value)
        throw Fault("protocol",
                    std::string(what) + ": the scale of row " + std::to_string(row) +
                        " differs between the groups of 32 lanes that should replicate it");
    return value;
  }

  void apply_scales(TensorMemory& t, Matrix& x, int base, int byte, const char* what) const {
    for (int c = 0; c < (x.rows + 31) / 32; ++c)
      for (int q = 0; q < 4; ++q) t.read(q, base + c, access(false, what));
    for (int r = 0; r < x.rows; ++r) x.scale(r, scale(t, base, r, byte, what));
  }

  bool step() override {
    ++w->cta->tensor_epoch;
    const Shape s = shape();
    static const char* const kinds[] = {"f16", "tf32", "f8f6f4", "mxf8f6f4"};
    m->work[std::string("mma ") + kinds[kind] + " M" + std::to_string(s.m) + " N" +
            std::to_string(s.n) + (a_in_tensor ? " A in tensor memory" : "")] += 1;
    m->work["mma operand bytes from shared memory"] +=
        static_cast<u64>(32 * (s.n + (a_in_tensor ? 0 : s.m)));
    const int half = s.n / group;
    Matrix b_all(s.n, 32 / element_bytes(s.type_b));
    for (int v = 0; v < group; ++v) {
      const Matrix part = load_operand(*cta(v).shared, b, true, !s.mn_b, s.type_b, half,
                                       access(true, "tcgen05.mma (B)"));
      const auto at = static_cast<long>(v) * static_cast<long>(part.x.size());
      std::copy(part.x.begin(), part.x.end(), b_all.x.begin() + at);
      std::copy(part.exponent.begin(), part.exponent.end(), b_all.exponent.begin() + at);
    }
    for (int v = 0; v < group; ++v) {
      TensorMemory& t = *cta(v).tensor;
      Matrix x = load_a(s, v);
      Matrix y = b_all;
      if (kind == K_MXF8F6F4) {
        apply_scales(t, x, sfa, s.sfa_byte, "tcgen05.mma (scales of A)");
        apply_scales(t, y, sfb, s.sfb_byte, "tcgen05.mma (scales of B)");
      }
      if (x.depth != y.depth) throw Fault("protocol", "tcgen05.mma: A and B differ in K");
      if (s.negate_a != s.negate_b)
        for (double& e : x.x) e = -e;
      touch(s, t);
      multiply(s, t, x, y.transposed(), v);
    }
    return true;
  }

  void touch(const Shape& s, TensorMemory& t) const {
    const int columns = group == 2 && s.m == 128 ? s.n / 2 : s.n;
    const Access by = access(false, "tcgen05.mma (D)");
    for (int q = 0; q < 4; ++q)
      for (int c = 0; c < columns; ++c) t.write(q, column + c, by);
  }

  void multiply(const Shape& s, TensorMemory& t, const Matrix& x, const Matrix& y, int v) const {
    std::vector<double> acc(static_cast<size_t>(s.n));
    for (int r = 0; r < x.rows; ++r) {
      for (int n = 0; n < s.n; ++n) {
        double d = 0;
        if (enable) {
          const auto [l, c] = d_cell(s, r, n);
          const u32 cell = t.get(l, column + c, "tcgen05.mma (D)");
          d = s.type_d == T_F32 ? as_float(cell) : decode(cell & 0xFFFF, kF16);
        }
        acc[static_cast<size_t>(n)] = d;
      }
      accumulate(x, r, y, acc.data(), numerics(*m, false));
      for (int n = 0; n < s.n; ++n) {
        const auto [l, c] = d_cell(s, r, n);
        if (disabled[static_cast<size_t>(4 * (group == 2 ? v : 0) + l / 32)] >> (l % 32) & 1)
          continue;
        const double d = acc[static_cast<size_t>(n)];
        t.set(l, column + c, s.type_d == T_F32 ? as_bits(static_cast<float>(d)) : encode(d, kF16));
      }
    }
  }
  std::string describe() const override {
    return "tcgen05.mma into column " + std::to_string(column);
  }
};

inline void execute_tensor(Machine& m, Warp& w, const Insn& i, u32 mask) {
  const auto lane = static_cast<int>(__builtin_ctz(mask));
  const auto address = [&](int k) {
    return static_cast<u32>(slot_value(m, w, i.a[k], lane)) + static_cast<u32>(i.a[k + 1]);
  };
  Engine& engine = *m.cluster->engine;
  const auto start = [&](auto& op) {
    use_group(*w.cta, i.sub, "tcgen05");
    if (mask & (mask - 1))
      throw Fault("protocol", "a tcgen05 operation issued by several threads of a warp at once");
    if (i.sub == 2 && (w.cta->rank & 1) && i.op == T5_MMA)
      throw Fault("protocol", "tcgen05.mma.cta_group::2 issued by the odd CTA of a pair");
    if (i.op != T5_COMMIT) w.tensor_lane = lane;
    op->m = &m;
    op->w = &w;
    op->group = i.sub;
    op->knows = publish(w);
  };
  switch (i.op) {
    case T5_DEALLOC:
      w.cta->tensor->release(static_cast<int>(w.r32(i.a[0])[0] & 0xFFFF),
                             static_cast<int>(w.r32(i.a[1])[0]));
      ++m.cluster->events;
      return;
    case T5_RELINQUISH: w.cta->relinquished = true; return;
    case T5_LD:
    case T5_ST: {
      if (mask != kAllLanes) throw Fault("protocol", "tcgen05.ld or st without all 32 lanes");
      const u32 a = address(2);
      const bool load = i.op == T5_LD;
      std::unique_ptr<TensorTransfer> op;
      if (load) {
        auto read = std::make_unique<TensorLoad>();
        read->reduction = i.sub;
        read->type = i.type;
        read->flags = i.flags;
        if (i.sub) {
          read->reduced = i.a[4 + i.a[1]];
          w.busy[static_cast<size_t>(read->reduced)] = kLoadTarget;
          ++w.busy_count;
        }
        op = std::move(read);
      } else {
        op = std::make_unique<TensorStore>();
      }
      op->m = &m;
      op->w = &w;
      op->shape = i.a[0];
      op->count = i.a[1];
      op->lane = static_cast<int>(a >> 16);
      op->column = static_cast<int>(a & 0xFFFF);
      op->knows = publish(w);
      op->epoch = load ? ++w.load_epoch : ++w.store_epoch;
      for (int k = 0; k < op->count; ++k) {
        const int slot = i.a[4 + k];
        if (load) {
          op->slots.push_back(slot);
          if (slot >= 0) {
            w.busy[static_cast<size_t>(slot)] = kLoadTarget;
            ++w.busy_count;
          }
        } else {
          op->data.insert(op->data.end(), w.r32(slot), w.r32(slot) + kWarpSize);
        }
      }
      engine.add(std::move(op), load ? w.loads : w.stores);
      return;
    }
    case T5_WAIT_LD: engine.drain(w.loads); return;
    case T5_WAIT_ST:
      engine.drain(w.stores);
      w.knows.all.raise(agent_of(w, kTmemStore), w.store_epoch);
      return;
    case T5_COMMIT: {
      auto op = std::make_unique<TensorCommit>();
      start(op);
      // 9.7.16.12.1: a commit tracks the operations of the executing thread only.
      if (w.tensor_lane >= 0 && w.tensor_lane != lane)
        throw Fault("protocol", "tcgen05.commit by lane " + std::to_string(lane) +
                                    " after operations of lane " + std::to_string(w.tensor_lane));
      const u32 a = address(0);
      op->offset = a & kOffsetMask;
      op->targets = i.a[2] >= 0 ? w.r32(i.a[2])[lane] & 0xFFFF : 1u << (a >> 24);
      engine.add(std::move(op), w.tensor);
      return;
    }
    case T5_CP: {
      auto op = std::make_unique<TensorCopy>();
      start(op);
      op->shape = i.type;
      op->column = static_cast<int>(address(0) & 0xFFFF);
      op->descriptor = w.r64(i.a[2])[lane];
      engine.add(std::move(op), w.tensor);
      return;
    }
    case T5_MMA: {
      auto op = std::make_unique<TensorMma>();
      start(op);
      op->kind = i.type;
      const u32 d = address(0);
      op->column = static_cast<int>(d & 0xFFFF);
      op->lane = static_cast<int>(d >> 16);
      op->a_in_tensor = i.a[4] != 0;
      if (op->a_in_tensor) {
        const u32 a = address(2);
        op->a_column = static_cast<int>(a & 0xFFFF);
        op->a_lane = static_cast<int>(a >> 16);
      } else {
        op->a = w.r64(i.a[2])[lane];
      }
      op->b = w.r64(i.a[5])[lane];
      op->idesc = w.r32(i.a[6])[lane];
      op->enable = w.predicates[static_cast<size_t>(i.a[7])] >> lane & 1;
      if (i.a[8] >= 0) {
        // CuTe repeats the byte index of the scales in address bits 30-31; the descriptor's count.
        const u32 sfa = w.r32(i.a[8])[lane] + static_cast<u32>(i.a[9]),
                  sfb = w.r32(i.a[10])[lane] + static_cast<u32>(i.a[11]);
        op->sfa = static_cast<int>(sfa & 0xFFFF);
        op->sfb = static_cast<int>(sfb & 0xFFFF);
      }
      for (int k = 0; k < i.a[12]; ++k)
        op->disabled[static_cast<size_t>(k)] = w.r32(i.a[13 + k])[lane];
      op->shape();  // refuse now, where the message names the instruction
      engine.add(std::move(op), w.tensor);
      return;
    }
    default: return;  // T5_FENCE: the orders that it makes are those of the program here
  }
}

}  // namespace ptx
