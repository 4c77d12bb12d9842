// The machine: warps with divergence, CTAs, clusters, mbarriers, asynchronous units, and the
// scheduler.
//
// A warp is a list of splits: lanes that share a program counter. The split with the lowest counter
// runs first, splits that meet merge; threads of a warp are otherwise independent (PTX ISA 3.1,
// "SIMT"). Instructions that need several lanes at once (.aligned, or a membermask) wait until one
// split holds them all.
//
// Asynchronous work sits in queues; the head of any queue may complete at any time. When it does is
// the schedule's choice: early (at issue), late (only when no warp can go on) or random.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <set>

#include "memory.hpp"
#include "tables.hpp"  // made by build.py from tables.txt

namespace ptx {

inline constexpr int kWarpSize = 32;
inline constexpr u32 kAllLanes = 0xFFFFFFFF;
inline constexpr u64 kSharedWindow = 0x00A1'0000ull << 32;  // generic addresses of shared memory
inline constexpr u32 kOffsetMask = 0x00FFFFFF;  // shared address = CTA rank << 24 | offset

// One decoded instruction; ops.def lists the arguments of each opcode.
struct Insn {
  int op, type, type2, sub, flags, guard, negate, line;
  const i32* a;
  int n;
  const i32* uses;  // data registers it touches
  int nuses;
};

struct Initial {  // a register that holds a constant or special value from the start
  i32 slot;
  i32 wide;
  i32 special;
  i32 unused;
  u64 value;
};

struct Program {
  std::vector<Insn> code;
  int slots = 0, predicates = 0;
  std::vector<Initial> initial;
  std::vector<u8> wide;  // by slot: a 64-bit register starts here
};

enum class Timing : int { Early, Late, Random };
enum class Order : int { Forward, Backward, Random };

struct Launch {
  u32 grid[3], block[3], cluster[3];
  u32 static_shared, dynamic_shared;
  u64 parameters;  // address of the parameter bytes
  u64 seed;
  Timing timing;
  Order order;
  u64 step_limit;
  u64 strict;    // remarks are faults
  u64 truncate;  // matrix products round as hardware is thought to
};

class Random {  // splitmix64
 public:
  explicit Random(u64 seed) : state_(seed) {}
  u64 next() {
    u64 z = (state_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  u32 below(u32 n) { return static_cast<u32>(next() % n); }

 private:
  u64 state_;
};

// An asynchronous operation. step() does the next part of it; true when there is none left.
struct AsyncOp {
  int line = 0;  // of the instruction that issued it
  virtual ~AsyncOp() = default;
  virtual bool step() = 0;
  virtual std::string describe() const = 0;
};

// Operations of one queue complete in order; queues are independent of each other.
struct Queue {
  std::deque<std::unique_ptr<AsyncOp>> ops;
};

class Engine {
 public:
  // `line` is that of the instruction under way.
  Engine(Timing timing, Random& random, const int& line)
      : timing_(timing), random_(random), line_(line) {}

  // Adds to `queue`, or to a queue of its own.
  void add(std::unique_ptr<AsyncOp> op, std::shared_ptr<Queue> queue = nullptr) {
    if (!queue) queue = std::make_shared<Queue>();
    op->line = line_;
    queue->ops.push_back(std::move(op));
    if (std::find(queues_.begin(), queues_.end(), queue) == queues_.end()) queues_.push_back(queue);
    if (timing_ == Timing::Early) drain(queue);
  }
  void drain(const std::shared_ptr<Queue>& queue) {
    while (!queue->ops.empty()) advance(*queue);
  }
  static void advance(Queue& queue) {
    AsyncOp& op = *queue.ops.front();
    try {
      if (op.step()) queue.ops.pop_front();
    } catch (const Fault& f) {
      throw Fault(f.kind, std::string(f.what()) + "\n  by what line " + std::to_string(op.line) +
                              " issued");
    }
  }
  // One step of some operation; false when there is none.
  bool advance_any() {
    sweep();
    if (queues_.empty()) return false;
    const auto queue = queues_[random_.below(static_cast<u32>(queues_.size()))];
    advance(*queue);
    return true;
  }
  bool idle() {
    sweep();
    return queues_.empty();
  }
  std::string describe() {
    sweep();
    std::string text;
    for (const auto& q : queues_) text += "\n  pending: " + q->ops.front()->describe();
    return text;
  }

 private:
  void sweep() {
    queues_.erase(std::remove_if(queues_.begin(), queues_.end(),
                                 [](const auto& q) { return q->ops.empty(); }),
                  queues_.end());
  }
  Timing timing_;
  Random& random_;
  const int& line_;
  std::vector<std::shared_ptr<Queue>> queues_;
};

// PTX ISA 9.7.13.15 "mbarrier".
struct MBarrier {
  u32 expected = 0;
  i64 pending = 0, transactions = 0;
  u64 phase = 0;             // completed phases
  u64 seen = 0;              // the latest phase that a wait has found complete
  Knowledge arriving, done;  // of the phase under way; of all completed ones
  int agent = -1;            // for copies that signal it
  u32 epoch = 0;
  int maker = -1;  // who initialised it, and in which epoch
  u32 made = 0;
};

struct Warp;
struct Cta;
struct Cluster;

struct NamedBarrier {  // PTX ISA 9.7.13.1 "bar, barrier"
  u32 arrived = 0, expected = 0;
  u64 generation = 0;
  Knowledge arriving, released;
  // Of the phase under way: whether its warps reduce (sub of BARRIER, else 0), predicates so far,
  // and the warps that get the result, with the slot of their predicate.
  int reduction = 0;
  bool any = false, all = true;
  std::vector<std::pair<Warp*, size_t>> targets;
};

struct Wait {
  enum Kind { None, OnMBarrier, OnBarrier, OnCluster, OnAllocation, OnLanes } kind = None;
  u64 token = 0;
  u32 detail = 0, detail2 = 0;
};

struct Split {
  u32 pc, mask;
  Wait wait;
};

// A bulk copy out of shared memory, as its bulk group sees it (PTX ISA 9.7.9.27.2).
struct BulkCopy {
  std::shared_ptr<Queue> queue;
  std::shared_ptr<bool> has_read;
  u32 epoch;
};

struct Warp {
  Cta* cta = nullptr;
  int index = 0;   // in the CTA
  int global = 0;  // in the cluster
  std::vector<u32> storage;
  u32* registers = nullptr;  // 64-byte aligned into storage
  std::vector<u32> predicates;
  u32 live = 0;
  std::vector<Split> splits;
  u64 steps = 0;

  Knowledge knows;
  u32 epoch = 1;

  std::shared_ptr<Queue> tensor = std::make_shared<Queue>(), wgmma = std::make_shared<Queue>(),
                         copies = std::make_shared<Queue>(), loads = std::make_shared<Queue>(),
                         stores = std::make_shared<Queue>();
  std::array<std::vector<std::vector<BulkCopy>>, kWarpSize> bulk_groups;  // closed groups, by lane
  std::array<std::vector<BulkCopy>, kWarpSize> bulk_open;
  u32 bulk_epoch = 0, copy_epoch = 0, store_epoch = 0, load_epoch = 0;
  std::vector<u32> copy_groups;   // cp.async: the last epoch of each closed group
  std::vector<u64> wgmma_groups;  // the last operation of each closed group
  u64 wgmma_issued = 0, wgmma_done = 0;
  int tensor_lane = -1;  // the thread that issued the last tcgen05.mma or cp
  std::vector<u8> busy;  // by slot: a pending tcgen05.ld or wgmma owns the register
  int busy_count = 0;

  u32* r32(int slot) const { return registers + slot * kWarpSize; }
  u64* r64(int slot) const { return reinterpret_cast<u64*>(registers + slot * kWarpSize); }
};

enum Busy : u8 { kFree, kLoadTarget, kWgmmaTarget, kWgmmaSource };

struct Cta {
  Cluster* cluster = nullptr;
  int rank = 0;
  u32 id[3] = {0, 0, 0};
  std::unique_ptr<SharedMemory> shared;
  std::unique_ptr<TensorMemory> tensor;
  std::vector<Warp> warps;
  std::array<NamedBarrier, 16> barriers;
  std::map<u32, MBarrier> mbarriers;  // by offset
  u32 tensor_epoch = 0;
  int tensor_group = 0;  // the cta_group that tcgen05 of this kernel uses
  bool relinquished = false;
  u32 live_warps = 0;
  // Agents of other CTAs that used its shared memory, and the last epochs of theirs that did.
  std::map<int, u32> visitors;
  Knowledge left;  // of its warps that have exited
};

struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas;
  std::unique_ptr<Agents> agents;
  std::unique_ptr<Engine> engine;
  NamedBarrier barrier;
  u64 events = 1;  // grows whenever something that may be waited for has happened
};

struct Machine {
  const Program& program;
  const Launch& launch;
  GlobalMemory& global;
  Random random;
  Cluster* cluster = nullptr;
  std::vector<u64> counts;  // executions of each instruction, by warps
  u64 steps = 0;
  std::set<std::string> remarks;
  std::map<std::string, u64> work;  // what units did, by name (README, "Counting work")

  // Something that known-good kernels do although the manual does not promise that it works.
  void remark(const std::string& text) {
    if (launch.strict) throw Fault("protocol", text);
    remarks.insert(text);
  }

  Machine(const Program& p, const Launch& l, GlobalMemory& g)
      : program(p), launch(l), global(g), random(l.seed), counts(p.code.size()) {}
};

// -- what threads know
// ---------------------------------------------------------------------------------------

inline int agent_of(const Warp& w, WarpAgent role) {
  return w.cta->cluster->agents->warp(w.global, role);
}

inline Access generic_access(const Warp& w, const char* what) {
  return {w.cta->cluster->agents.get(), &w.knows, agent_of(w, kGeneric), w.epoch, false, what};
}

// What the warp knows now. Later accesses of its own fall into a new epoch.
inline const Knowledge& publish(Warp& w) {
  w.knows.all.raise(agent_of(w, kGeneric), w.epoch);
  ++w.epoch;
  return w.knows;
}

// -- addresses
// -------------------------------------------------------------------------------------------------

inline Cta& cta_at(Machine& m, u32 rank, const char* what) {
  if (rank >= m.cluster->ctas.size())
    throw Fault("bounds", std::string(what) + " names CTA " + std::to_string(rank) +
                              " of a cluster of " + std::to_string(m.cluster->ctas.size()));
  Cta& cta = *m.cluster->ctas[rank];
  if (cta.live_warps == 0)
    throw Fault("protocol",
                std::string(what) + " reaches CTA " + std::to_string(rank) + ", which has exited");
  return cta;
}

inline Cta& shared_target(Machine& m, Warp& w, u32 address, bool cluster, const char* what) {
  const u32 rank = address >> 24;
  if (!cluster && rank != static_cast<u32>(w.cta->rank))
    throw Fault("bounds", std::string(what) + " uses the address of CTA " + std::to_string(rank) +
                              " in the shared::cta space of CTA " + std::to_string(w.cta->rank));
  Cta& cta = cta_at(m, rank, what);
  if (&cta != w.cta) cta.visitors[agent_of(w, kGeneric)] = w.epoch;
  return cta;
}

}  // namespace ptx
