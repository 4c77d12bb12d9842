// Asynchronous copies: cp.async (PTX ISA 9.7.9.25.3), bulk copies (25.4) and tensor copies, TMA
// (27).
//
// A load announces its destination at issue: from then on reading or writing those bytes is a
// fault. The data, read from global memory only then, and the mbarrier's transaction land when the
// copy completes. A store reads shared memory in one step and writes global memory in another, both
// as late as its bulk group allows.
#pragma once

#include "mbarrier.hpp"

namespace ptx {

// The 128-byte tensor map, as far as tiled maps of the CuTe DSL use it (README, "Tensor maps").
struct TensorMap {
  u64 address;
  int rank, bytes, type, swizzle;  // swizzle: log2 of 16-byte chunks in a span, 0 to 3
  bool fill_nan;
  std::array<u64, 5> size, stride;
  std::array<u32, 5> box;

  u32 inner() const { return box[0] * static_cast<u32>(bytes); }
  u32 total() const {
    u32 n = inner();
    for (int d = 1; d < rank; ++d) n *= box[static_cast<size_t>(d)];
    return n;
  }
};

inline TensorMap decode_tensor_map(const u8* p) {
  u32 w[16];
  std::memcpy(w, p, sizeof w);
  TensorMap t{};
  t.address = static_cast<u64>(w[1]) << 32 | w[0];
  t.rank = static_cast<int>(w[2] >> 4 & 7) + 1;
  const u32 code = w[2] >> 7 & 15;
  static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2};
  static const int types[] = {T_U8,  T_U16, T_U32, T_S32, T_U64, T_S64,
                              T_F16, T_F32, T_F32, T_F64, T_BF16};
  const auto refuse = [](const std::string& what) {
    throw Fault("unsupported", "tensor map: " + what);
  };
  if (code > 10) refuse("element code " + std::to_string(code));
  if (t.rank > 5) refuse("rank " + std::to_string(t.rank));
  if (w[2] >> 11 & 3) refuse("interleaved layout");
  if (w[2] >> 19 & 3) refuse("swizzle atomicity other than 16 bytes");
  if (w[2] >> 22 & 1) refuse("96-byte swizzle");
  if (w[13] & 0x7FFF) refuse("element strides other than 1");
  t.bytes = bytes[code];
  t.type = types[code];
  t.swizzle = static_cast<int>(w[2] >> 13 & 3);
  t.fill_nan = w[2] >> 15 & 1;
  for (size_t d = 0; d < 5; ++d) {
    t.size[d] = static_cast<u64>(w[8 + d]) + 1;
    t.box[d] = (d == 0 ? w[13] >> 24 : w[14] >> (8 * (d - 1)) & 0xFF) + 1;
    t.stride[d] = d == 0 ? static_cast<u64>(t.bytes)
                         : (static_cast<u64>(w[7] >> (4 * (d - 1)) & 15) << 32 | w[2 + d]) << 4;
  }
  if (t.address % 16) refuse("address " + hex(t.address) + " is not a multiple of 16");
  if (t.inner() % 16)
    refuse("the box is " + std::to_string(t.inner()) + " bytes wide, not a multiple of 16");
  if (t.swizzle && t.inner() != 16u << t.swizzle)
    refuse("a box of " + std::to_string(t.inner()) + " bytes in a swizzle span of " +
           std::to_string(16 << t.swizzle));
  return t;
}

// PTX ISA 5.5.7 "Swizzling modes": 16-byte chunks are permuted by the bits above the 128-byte row.
inline u32 swizzle(u32 address, int bits) {
  return address ^ ((address >> 7 & ((1u << bits) - 1)) << 4);
}

// Calls visit(shared offset, global address, elements, in bounds) for runs of elements that are
// contiguous on both sides: at most one 16-byte chunk.
template <class Visit>
inline void for_each_run(const TensorMap& t, u32 offset, const std::array<i32, 5>& at,
                         Visit visit) {
  const u32 per_chunk = 16 / static_cast<u32>(t.bytes), rows = t.total() / t.inner();
  for (u32 row = 0; row < rows; ++row) {
    u32 rest = row;
    u64 address = t.address;
    bool inside = true;
    for (int d = 1; d < t.rank; ++d) {
      const auto k = static_cast<size_t>(d);
      const i64 x = static_cast<i64>(at[k]) + rest % t.box[k];
      rest /= t.box[k];
      inside = inside && x >= 0 && static_cast<u64>(x) < t.size[k];
      address += static_cast<u64>(x) * t.stride[k];
    }
    for (u32 first = 0; first < t.box[0]; first += per_chunk) {
      const u32 where =
          swizzle(offset + row * t.inner() + first * static_cast<u32>(t.bytes), t.swizzle);
      const i64 x = static_cast<i64>(at[0]) + first;
      const i64 from = std::clamp<i64>(-x, 0, per_chunk);
      const i64 to = std::clamp<i64>(static_cast<i64>(t.size[0]) - x, 0, per_chunk);
      if (!inside || from >= to) {
        visit(where, u64{0}, per_chunk, false);
        continue;
      }
      const auto bytes = static_cast<u32>(t.bytes);
      if (from > 0) visit(where, u64{0}, static_cast<u32>(from), false);
      visit(where + static_cast<u32>(from) * bytes, address + static_cast<u64>(x + from) * bytes,
            static_cast<u32>(to - from), true);
      if (to < per_chunk)
        visit(where + static_cast<u32>(to) * bytes, u64{0}, per_chunk - static_cast<u32>(to),
              false);
    }
  }
}

// A copy into the shared memory of one CTA that ends with a transaction on an mbarrier.
struct SharedLoad : AsyncOp {
  Machine* m;
  Cta* target;
  u32 offset, bytes;
  Cta* barrier_cta;
  u32 barrier;
  Knowledge knows;
  std::string name;

  virtual void fill(u8* destination) = 0;

  void announce() {
    const MBarrier& b = mbarrier_at(*barrier_cta, barrier, name.c_str());
    target->shared->write(offset, bytes,
                          {m->cluster->agents.get(), &knows, b.agent, ~0u, true, name.c_str()},
                          SharedMemory::kInFlight);
  }
  bool step() override {
    if (target->live_warps == 0)
      throw Fault("protocol",
                  name + " lands in CTA " + std::to_string(target->rank) + ", which has exited");
    MBarrier& b = mbarrier_at(*barrier_cta, barrier, name.c_str());
    ++b.epoch;
    fill(target->shared->land(offset, bytes, b.agent, b.epoch));
    m->work[name + " bytes into shared memory"] += bytes;
    knows.all.raise(b.agent, b.epoch);
    mbarrier_complete(*m, *barrier_cta, barrier, bytes, knows, name.c_str());
    return true;
  }
  std::string describe() const override {
    return name + " of " + std::to_string(bytes) + " bytes into " + target->shared->place(offset);
  }
};

struct TmaLoad : SharedLoad {
  TensorMap map;
  std::array<i32, 5> at;
  void fill(u8* destination) override {
    u8* const base = destination - offset;
    for_each_run(map, offset, at, [&](u32 where, u64 address, u32 elements, bool inside) {
      const u32 n = elements * static_cast<u32>(map.bytes);
      if (inside)
        std::memcpy(base + where, m->global.read(address, n, "a TMA load"), n);
      else
        std::memset(base + where, map.fill_nan ? 0xFF : 0, n);
    });
  }
};

struct BulkLoad : SharedLoad {
  u64 source;
  void fill(u8* destination) override {
    std::memcpy(destination, m->global.read(source, bytes, "cp.async.bulk"), bytes);
  }
};

// st.async (PTX ISA 9.7.9 "st.async"): registers to the shared memory of a CTA of the cluster.
struct RegisterStore : SharedLoad {
  std::array<u8, 16> data;
  void fill(u8* destination) override { std::memcpy(destination, data.data(), bytes); }
};

struct SharedToShared : SharedLoad {
  Cta* from;
  u32 from_offset;
  Knowledge issued;
  int agent;
  u32 epoch;
  void fill(u8* destination) override {
    const Access by{m->cluster->agents.get(), &issued, agent, epoch, true, "cp.async.bulk"};
    std::memcpy(destination, from->shared->read(from_offset, bytes, by), bytes);
    knows.all.raise(agent, epoch);  // whoever sees the transaction knows that the source is free
  }
};

inline void reduce_element(u8* to, const u8* from, int type, int operation) {
  const auto apply = [&](auto tag) {
    using T = decltype(tag);
    T a, b;
    std::memcpy(&a, to, sizeof a);
    std::memcpy(&b, from, sizeof b);
    if (operation == R_ADD)
      a = static_cast<T>(a + b);
    else if (operation == R_MIN)
      a = std::min(a, b);
    else if (operation == R_MAX)
      a = std::max(a, b);
    else
      throw Fault("unsupported", "reduction of a bulk copy");
    std::memcpy(to, &a, sizeof a);
  };
  switch (type) {
    case T_F32: {
      if (operation != R_ADD) throw Fault("unsupported", "f32 reduction other than add");
      float a, b;
      std::memcpy(&a, to, 4);
      std::memcpy(&b, from, 4);
      a = flush(flush(a) + flush(b));  // bulk add.f32 flushes subnormals (PTX ISA 9.7.9.25.4.2)
      std::memcpy(to, &a, 4);
      return;
    }
    case T_F64: apply(double{}); return;
    case T_F16:
    case T_BF16: {
      if (operation != R_ADD) throw Fault("unsupported", "16-bit float reduction other than add");
      const Format& f = type == T_F16 ? kF16 : kBF16;
      u16 a, b;
      std::memcpy(&a, to, 2);
      std::memcpy(&b, from, 2);
      a = static_cast<u16>(encode(decode(a, f) + decode(b, f), f));
      std::memcpy(to, &a, 2);
      return;
    }
    case T_U32: apply(u32{}); return;
    case T_S32: apply(i32{}); return;
    case T_U64: apply(u64{}); return;
    case T_S64: apply(i64{}); return;
    default: throw Fault("unsupported", "element type of a bulk reduction");
  }
}

// Shared to global, plain or reducing: first read, later write.
struct SharedStore : AsyncOp {
  Machine* m;
  Cta* source;
  Knowledge knows;
  int agent;
  u32 epoch;
  int type, operation;  // Reduction, R_NONE for a plain store
  bool counted;  // in Machine::work: one of the lanes that issued it with the same instruction
  std::shared_ptr<bool> has_read = std::make_shared<bool>(false);
  std::vector<u8> data;
  struct Run {
    u64 address;
    u32 bytes;
  };
  std::vector<Run> runs;

  virtual void collect(const Access& by) = 0;
  void take(u32 where, u64 address, u32 bytes, const Access& by) {
    const u8* p = source->shared->read(where, bytes, by);
    data.insert(data.end(), p, p + bytes);
    runs.push_back({address, bytes});
  }
  bool step() override {
    if (!*has_read) {
      if (source->live_warps == 0)
        m->remark(describe() + " reads the shared memory of a CTA that has exited");
      collect({m->cluster->agents.get(), &knows, agent, epoch, true, "a bulk store"});
      *has_read = true;
      return false;
    }
    if (counted)
      m->work[operation == R_NONE ? "bulk store bytes" : "bulk reduction bytes"] += data.size();
    const u8* p = data.data();
    const int size = type == T_F64 || type == T_U64 || type == T_S64 ? 8
                     : type == T_F16 || type == T_BF16               ? 2
                                                                     : 4;
    for (const Run& r : runs) {
      if (operation == R_NONE) {
        std::memcpy(m->global.write(r.address, r.bytes, "a bulk store"), p, r.bytes);
      } else {
        m->global.read(r.address, r.bytes, "a bulk reduction");
        u8* to = m->global.write(r.address, r.bytes, "a bulk reduction");
        for (u32 k = 0; k < r.bytes; k += static_cast<u32>(size))
          reduce_element(to + k, p + k, type, operation);
      }
      p += r.bytes;
    }
    return true;
  }
};

struct TmaStore : SharedStore {
  TensorMap map;
  std::array<i32, 5> at;
  u32 offset;
  void collect(const Access& by) override {
    for_each_run(map, offset, at, [&](u32 where, u64 address, u32 elements, bool inside) {
      if (inside) take(where, address, elements * static_cast<u32>(map.bytes), by);
    });
  }
  std::string describe() const override {
    return "TMA store from " + source->shared->place(offset);
  }
};

struct BulkStore : SharedStore {
  u32 offset, bytes;
  u64 destination;
  void collect(const Access& by) override { take(offset, destination, bytes, by); }
  std::string describe() const override {
    return "bulk store from " + source->shared->place(offset);
  }
};

// -- cp.async
// ------------------------------------------------------------------------------------------------

struct CpAsync : AsyncOp {
  Machine* m;
  Warp* w;
  u32 epoch;
  struct Lane {
    u32 offset;
    u64 source;
    u32 bytes, valid;
  };
  std::vector<Lane> lanes;
  bool step() override {
    for (const Lane& l : lanes) {
      u8* to = w->cta->shared->land(l.offset, l.bytes, agent_of(*w, kCopy), epoch);
      std::memset(to, 0, l.bytes);
      if (l.valid) std::memcpy(to, m->global.read(l.source, l.valid, "cp.async"), l.valid);
    }
    return true;
  }
  std::string describe() const override { return "cp.async of warp " + std::to_string(w->index); }
};

struct CpAsyncArrive : AsyncOp {
  Machine* m;
  Warp* w;
  u32 offset, count;
  Knowledge knows;
  bool step() override {
    mbarrier_arrive(*m, *w->cta, offset, count, knows, "cp.async.mbarrier.arrive");
    return true;
  }
  std::string describe() const override {
    return "cp.async.mbarrier.arrive of warp " + std::to_string(w->index);
  }
};

inline u64 slot_value(const Machine& m, const Warp& w, int slot, int l) {
  return m.program.wide[static_cast<size_t>(slot)] ? w.r64(slot)[l] : w.r32(slot)[l];
}

inline void execute_cp_async(Machine& m, Warp& w, const Insn& i, u32 mask) {
  const auto address = [&](int k, int l) {
    return static_cast<u32>(slot_value(m, w, i.a[k], l)) + static_cast<u32>(i.a[k + 1]);
  };
  switch (i.op) {
    case CP_ASYNC: {
      auto op = std::make_unique<CpAsync>();
      op->m = &m;
      op->w = &w;
      op->epoch = ++w.copy_epoch;
      each(mask, [&](int l) {
        const u32 a = address(0, l), bytes = static_cast<u32>(i.a[4]);
        shared_target(m, w, a, false, "cp.async");
        if (a % bytes) throw Fault("alignment", "cp.async to " + hex(a));
        const u32 valid = i.a[5] >= 0 ? std::min(w.r32(i.a[5])[l], bytes) : bytes;
        Access by = generic_access(w, "cp.async");
        by.agent = agent_of(w, kCopy);
        by.epoch = ~0u;
        w.cta->shared->write(a & kOffsetMask, bytes, by, SharedMemory::kInFlight);
        op->lanes.push_back(
            {a & kOffsetMask,
             slot_value(m, w, i.a[2], l) + static_cast<u64>(static_cast<i64>(i.a[3])), bytes,
             valid});
      });
      m.cluster->engine->add(std::move(op), w.copies);
      return;
    }
    case CP_ASYNC_COMMIT: w.copy_groups.push_back(w.copy_epoch); return;
    case CP_ASYNC_WAIT: {
      const size_t keep = i.a[0] < 0 ? 0 : static_cast<size_t>(i.a[0]);
      if (keep == 0) m.cluster->engine->drain(w.copies);
      if (w.copy_groups.size() <= keep) return;
      const u32 upto = w.copy_groups[w.copy_groups.size() - keep - 1];
      // The queue is in order, so stop before the first copy of a younger group.
      while (!w.copies->ops.empty()) {
        const auto* copy = dynamic_cast<CpAsync*>(w.copies->ops.front().get());
        if (copy && copy->epoch > upto) break;
        Engine::advance(*w.copies);
      }
      w.knows.all.raise(agent_of(w, kCopy), keep == 0 ? w.copy_epoch : upto);
      return;
    }
    default:  // CP_ASYNC_MBAR: one arrival for each thread, once its earlier copies are done
      each(mask, [&](int l) {
        const u32 a = address(0, l), offset = a & kOffsetMask;
        shared_target(m, w, a, false, "cp.async.mbarrier.arrive");
        if (i.sub == 0) ++mbarrier_at(*w.cta, offset, "cp.async.mbarrier.arrive").pending;
        auto op = std::make_unique<CpAsyncArrive>();
        op->m = &m;
        op->w = &w;
        op->offset = offset;
        op->count = 1;
        op->knows.all.raise(agent_of(w, kCopy), w.copy_epoch);
        m.cluster->engine->add(std::move(op), w.copies);
      });
  }
}

// -- bulk and tensor copies
// ----------------------------------------------------------------------------------

inline void issue_load(Machine& m, Warp& w, std::unique_ptr<SharedLoad> op, u32 destination,
                       u32 bytes, Cta& barrier_cta, u32 barrier, const char* name) {
  op->m = &m;
  op->target = &cta_at(m, destination >> 24, name);
  op->offset = destination & kOffsetMask;
  op->bytes = bytes;
  op->barrier_cta = &barrier_cta;
  op->barrier = barrier;
  op->knows = publish(w);
  op->name = name;
  op->announce();
  m.cluster->engine->add(std::move(op));
}

inline void issue_store(Machine& m, Warp& w, u32 mask, int lane, std::unique_ptr<SharedStore> op) {
  op->counted = lane == __builtin_ctz(mask);
  op->m = &m;
  op->source = w.cta;
  op->knows = publish(w);
  op->agent = agent_of(w, kBulk);
  op->epoch = ++w.bulk_epoch;
  auto queue = std::make_shared<Queue>();
  w.bulk_open[static_cast<size_t>(lane)].push_back({queue, op->has_read, op->epoch});
  m.cluster->engine->add(std::move(op), queue);
}

inline void execute_st_async(Machine& m, Warp& w, const Insn& i, u32 mask) {
  each(mask, [&](int l) {
    const u32 to = static_cast<u32>(slot_value(m, w, i.a[0], l)) + static_cast<u32>(i.a[1]);
    const u32 bar = static_cast<u32>(slot_value(m, w, i.a[2], l)) + static_cast<u32>(i.a[3]);
    const u32 bytes = static_cast<u32>(i.a[4] * i.a[5]);
    if (to % bytes) throw Fault("alignment", "st.async to " + hex(to));
    if ((bar ^ to) >> 24)
      throw Fault("protocol", "st.async: mbarrier and destination are in different CTAs");
    auto op = std::make_unique<RegisterStore>();
    for (int k = 0; k < i.a[4]; ++k) {
      const u64 x = slot_value(m, w, i.a[6 + k], l);
      std::memcpy(op->data.data() + k * i.a[5], &x, static_cast<size_t>(i.a[5]));
    }
    issue_load(m, w, std::move(op), to, bytes, cta_at(m, bar >> 24, "st.async"), bar & kOffsetMask,
               "st.async");
  });
}

inline void execute_bulk(Machine& m, Warp& w, const Insn& i, u32 mask) {
  const auto address = [&](int k, int l) {
    return static_cast<u32>(slot_value(m, w, i.a[k], l)) + static_cast<u32>(i.a[k + 1]);
  };
  const auto wide_address = [&](int k, int l) {
    return slot_value(m, w, i.a[k], l) + static_cast<u64>(static_cast<i64>(i.a[k + 1]));
  };
  const auto multiple = [](u64 x, u64 of, const char* what) {
    if (x % of)
      throw Fault("alignment",
                  std::string(what) + " " + hex(x) + " is not a multiple of " + std::to_string(of));
  };
  each(mask, [&](int l) {
    switch (i.op) {
      case BULK_G2S:
      case BULK_S2S: {
        const u32 to = address(0, l), size = w.r32(i.a[4])[l], bar = address(5, l);
        multiple(to, 16, "cp.async.bulk: destination");
        multiple(size, 16, "cp.async.bulk: size");
        if ((bar ^ to) >> 24)
          throw Fault("protocol", "cp.async.bulk: mbarrier and destination are in different CTAs");
        Cta& bar_cta = cta_at(m, bar >> 24, "cp.async.bulk");
        if (i.op == BULK_G2S) {
          auto op = std::make_unique<BulkLoad>();
          op->source = wide_address(2, l);
          multiple(op->source, 16, "cp.async.bulk: source");
          issue_load(m, w, std::move(op), to, size, bar_cta, bar & kOffsetMask, "cp.async.bulk");
        } else {
          const u32 from = address(2, l);
          multiple(from, 16, "cp.async.bulk: source");
          auto op = std::make_unique<SharedToShared>();
          op->from = &shared_target(m, w, from, false, "cp.async.bulk");
          op->from_offset = from & kOffsetMask;
          op->issued = publish(w);
          op->agent = agent_of(w, kBulk);
          op->epoch = ++w.bulk_epoch;
          issue_load(m, w, std::move(op), to, size, bar_cta, bar & kOffsetMask, "cp.async.bulk");
        }
        return;
      }
      case BULK_S2G: {
        auto op = std::make_unique<BulkStore>();
        op->destination = wide_address(0, l);
        const u32 from = address(2, l);
        op->bytes = w.r32(i.a[4])[l];
        multiple(op->destination, 16, "cp.async.bulk: destination");
        multiple(from, 16, "cp.async.bulk: source");
        multiple(op->bytes, 16, "cp.async.bulk: size");
        shared_target(m, w, from, false, "cp.async.bulk");
        op->offset = from & kOffsetMask;
        op->type = i.type;
        op->operation = i.sub;
        issue_store(m, w, mask, l, std::move(op));
        return;
      }
      case TMA_LOAD: {
        const int rank = i.a[0], k = 1 + rank;
        std::array<i32, 5> at{};
        for (int d = 0; d < rank; ++d)
          at[static_cast<size_t>(d)] = static_cast<i32>(w.r32(i.a[1 + d])[l]);
        const TensorMap map = decode_tensor_map(
            m.global.read(slot_value(m, w, i.a[k + 2], l), 128, "TMA: tensor map"));
        if (map.rank != rank)
          throw Fault("protocol", "a tensor copy of rank " + std::to_string(rank) +
                                      " with a map of rank " + std::to_string(map.rank));
        const u32 to = address(k, l), bar = address(k + 3, l);
        multiple(to, 128, "TMA load: destination");
        const bool multicast = i.a[k + 5] >= 0;
        const u32 targets = multicast ? w.r32(i.a[k + 5])[l] & 0xFFFF : 1u << (to >> 24);
        if (!targets) throw Fault("protocol", "a multicast to no CTA");
        for (u32 t = targets; t; t &= t - 1) {
          const u32 rank_to = static_cast<u32>(__builtin_ctz(t));
          u32 rank_bar = bar >> 24;
          if (i.sub == 2) {  // .cta_group::2: the member of the destination's pair with the parity
                             // of the mbarrier's CTA
            if (!multicast && (rank_bar ^ rank_to) > 1)
              throw Fault("protocol",
                          "TMA load: the mbarrier is not in the destination's CTA pair");
            rank_bar = (rank_to & ~1u) | (rank_bar & 1);
          } else if (multicast) {
            rank_bar = rank_to;
          } else if (rank_bar != rank_to) {
            throw Fault("protocol", "TMA load: the mbarrier is in CTA " + std::to_string(rank_bar) +
                                        ", the destination in CTA " + std::to_string(rank_to));
          }
          auto op = std::make_unique<TmaLoad>();
          op->map = map;
          op->at = at;
          issue_load(m, w, std::move(op), rank_to << 24 | (to & kOffsetMask), map.total(),
                     cta_at(m, rank_bar, "TMA load"), bar & kOffsetMask, "TMA load");
        }
        return;
      }
      case TMA_STORE: {
        const int rank = i.a[0], k = 1 + rank;
        auto op = std::make_unique<TmaStore>();
        op->at = {};
        for (int d = 0; d < rank; ++d)
          op->at[static_cast<size_t>(d)] = static_cast<i32>(w.r32(i.a[1 + d])[l]);
        op->map = decode_tensor_map(
            m.global.read(slot_value(m, w, i.a[k + 2], l), 128, "TMA: tensor map"));
        if (op->map.rank != rank)
          throw Fault("protocol", "a tensor copy of rank " + std::to_string(rank) +
                                      " with a map of rank " + std::to_string(op->map.rank));
        const u32 from = address(k, l);
        multiple(from, 128, "TMA store: source");
        shared_target(m, w, from, false, "TMA store");
        op->offset = from & kOffsetMask;
        op->type = op->map.type;
        op->operation = i.sub;
        issue_store(m, w, mask, l, std::move(op));
        return;
      }
      case BULK_COMMIT: {
        auto& open = w.bulk_open[static_cast<size_t>(l)];
        w.bulk_groups[static_cast<size_t>(l)].push_back(std::move(open));
        open.clear();
        return;
      }
      default: {  // BULK_WAIT: all but the newest n groups; .read: only their reads
        auto& groups = w.bulk_groups[static_cast<size_t>(l)];
        const size_t keep = static_cast<size_t>(i.a[0]);
        const size_t ripe = groups.size() > keep ? groups.size() - keep : 0;
        for (size_t g = 0; g < ripe; ++g)
          for (BulkCopy& c : groups[g]) {
            while (!c.queue->ops.empty() && !*c.has_read) Engine::advance(*c.queue);
            if (i.sub == 0) m.cluster->engine->drain(c.queue);
            w.knows.all.raise(agent_of(w, kBulk), c.epoch);
          }
        if (i.sub == 0) groups.erase(groups.begin(), groups.begin() + static_cast<long>(ripe));
      }
    }
  });
}

}  // namespace ptx
