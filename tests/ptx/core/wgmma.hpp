// wgmma (PTX ISA 9.7.15), one warp's 16 rows at a time: rows depend on nothing of the other three
// warps.
//
// An operation reads shared memory and its A registers, and writes its accumulators, when its group
// is waited for or when the schedule says so. Until then, other instructions must not touch those
// registers.
#pragma once

#include "tensor.hpp"

namespace ptx {

struct Wgmma : AsyncOp {
  Machine* m;
  Warp* w;
  int n, type_a, type_b;
  bool a_in_registers, accumulate_d, negate_a, negate_b, mn_a, mn_b;
  u64 a, b, serial;
  std::array<int, 4> a_slots;
  std::vector<int> slots;
  Knowledge knows;

  bool step() override {
    const Access by{m->cluster->agents.get(), &knows, agent_of(*w, kWgmma),
                    static_cast<u32>(serial), true,   "wgmma"};
    const int depth = 32 / element_bytes(type_a), base = 16 * (w->index % 4);
    Matrix x(16, depth);
    if (a_in_registers) {
      const int bytes = element_bytes(type_a), per_register = 4 / bytes;
      for (int t = 0; t < kWarpSize; ++t)
        for (int j = 0; j < 4 * per_register; ++j) {
          // 9.7.15.5.1.1: registers 1 and 3 hold rows 8-15, registers 2 and 3 the upper half of k.
          const int r = j / per_register, row = t / 4 + 8 * (r % 2);
          const int k = per_register * (t % 4) + j % per_register + 4 * per_register * (r / 2);
          const u32 bits =
              w->r32(a_slots[static_cast<size_t>(r)])[t] >> (8 * bytes * (j % per_register));
          x.set(row, k, bits & (bytes == 4 ? kAllLanes : (1u << (8 * bytes)) - 1), type_a);
        }
    } else {
      // Only this warp's rows: kernels may order the others' with a bar.warp.sync (FlashAttention
      // does, for P). The manual treats the four warps as one.
      x = load_operand(*w->cta->shared, a, false, !mn_a, type_a, 16, by, base);
    }
    if (w->index % 4 == 0) {  // once for the four warps that share it
      m->work["wgmma N" + std::to_string(n) + " K" + std::to_string(depth) +
              (a_in_registers ? " A in registers" : "")] += 1;
      m->work["mma operand bytes from shared memory"] +=
          static_cast<u64>(32 * (n + (a_in_registers ? 0 : 64)));
    }
    Matrix y = load_operand(*w->cta->shared, b, false, !mn_b, type_b, n, by);
    if (negate_a != negate_b)
      for (double& e : x.x) e = -e;
    const Matrix by_k = y.transposed();
    const auto place = [&](int t, int i) {  // (row, column) of accumulator register i of thread t
      return std::pair{t / 4 + 8 * (i / 2 % 2), 2 * (t % 4) + i % 2 + 8 * (i / 4)};
    };
    std::vector<double> acc(static_cast<size_t>(16 * n));
    const auto cell = [&](int t, int i) -> u32& {
      return w->r32(slots[static_cast<size_t>(i)])[t];
    };
    for (int t = 0; t < kWarpSize && accumulate_d; ++t)
      for (int i = 0; i < n / 2; ++i) {
        const auto [row, column] = place(t, i);
        acc[static_cast<size_t>(row * n + column)] = as_float(cell(t, i));
      }
    const bool fp8 = type_a == T_E4M3 || type_a == T_E5M2;
    for (int row = 0; row < 16; ++row)
      accumulate(x, row, by_k, acc.data() + static_cast<long>(row) * n, numerics(*m, fp8));
    for (int t = 0; t < kWarpSize; ++t)
      for (int i = 0; i < n / 2; ++i) {
        const auto [row, column] = place(t, i);
        cell(t, i) = as_bits(static_cast<float>(acc[static_cast<size_t>(row * n + column)]));
      }
    w->wgmma_done = serial;
    return true;
  }
  std::string describe() const override {
    return "wgmma of CTA " + std::to_string(w->cta->rank) + " warp " + std::to_string(w->index);
  }
};

inline void mark_busy(Warp& w, int slot, Busy state) {
  u8& b = w.busy[static_cast<size_t>(slot)];
  if (b == kFree) ++w.busy_count;
  if (b != kWgmmaTarget) b = state;
}

inline void execute_wgmma(Machine& m, Warp& w, const Insn& i) {
  Engine& engine = *m.cluster->engine;
  switch (i.op) {
    case WG_COMMIT: w.wgmma_groups.push_back(w.wgmma_issued); return;
    case WG_WAIT: {
      const auto keep = static_cast<size_t>(i.a[0]);
      if (w.wgmma_groups.size() <= keep) return;
      const u64 upto = w.wgmma_groups[w.wgmma_groups.size() - keep - 1];
      while (w.wgmma_done < upto) Engine::advance(*w.wgmma);
      w.wgmma_groups.erase(w.wgmma_groups.begin(), w.wgmma_groups.end() - static_cast<long>(keep));
      // Registers stay owned by whatever is still in flight.
      for (size_t s = 0; s < w.busy.size(); ++s)
        if (w.busy[s] == kWgmmaTarget || w.busy[s] == kWgmmaSource) {
          w.busy[s] = kFree;
          --w.busy_count;
        }
      for (const auto& op : w.wgmma->ops) {
        const auto& g = static_cast<const Wgmma&>(*op);
        for (const int s : g.slots) mark_busy(w, s, kWgmmaTarget);
        if (g.a_in_registers)
          for (const int s : g.a_slots) mark_busy(w, s, kWgmmaSource);
      }
      w.knows.all.raise(agent_of(w, kWgmma), static_cast<u32>(upto));
      return;
    }
    case WG_MMA: {
      auto op = std::make_unique<Wgmma>();
      op->m = &m;
      op->w = &w;
      op->n = i.a[0];
      op->a_in_registers = i.a[2] != 0;
      op->accumulate_d = w.predicates[static_cast<size_t>(i.a[3])] & 1;
      op->negate_a = i.a[4] != 0;
      op->negate_b = i.a[5] != 0;
      op->mn_a = i.a[6] != 0;
      op->mn_b = i.a[7] != 0;
      op->b = w.r64(i.a[8])[0];
      op->type_a = i.type;
      op->type_b = i.type2;
      int k = 9;
      if (op->a_in_registers) {
        for (int r = 0; r < 4; ++r) op->a_slots[static_cast<size_t>(r)] = i.a[k++];
      } else {
        op->a = w.r64(i.a[k++])[0];
      }
      for (int r = 0; r < op->n / 2; ++r) op->slots.push_back(i.a[k++]);
      op->serial = ++w.wgmma_issued;
      op->knows = publish(w);
      for (const int s : op->slots) mark_busy(w, s, kWgmmaTarget);
      if (op->a_in_registers)
        for (const int s : op->a_slots) mark_busy(w, s, kWgmmaSource);
      engine.add(std::move(op), w.wgmma);
      return;
    }
    default: return;  // WG_FENCE: register accesses are in program order here
  }
}

// Before an instruction touches a register that an asynchronous operation owns.
inline void settle_registers(Machine& m, Warp& w, const Insn& i) {
  for (int k = 0; k < i.nuses; ++k) {
    switch (w.busy[static_cast<size_t>(i.uses[k])]) {
      case kLoadTarget: m.cluster->engine->drain(w.loads); break;
      case kWgmmaTarget:
        if (i.op != WG_MMA)
          throw Fault("race",
                      "touches an accumulator register of a wgmma that has not been waited for");
        break;
      case kWgmmaSource:
        if (i.op != WG_MMA)
          throw Fault("race", "touches an A register of a wgmma that has not been waited for");
        break;
      default: break;
    }
  }
}

}  // namespace ptx
