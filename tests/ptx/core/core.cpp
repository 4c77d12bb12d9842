// The scheduler, and the C interface that machine.py calls.
#include "interpreter.hpp"

namespace ptx {

struct Where {
  int line = 0, cta = -1, warp = -1;
};

class Scheduler {
 public:
  Scheduler(Machine& m, Where& where) : m_(m), run_(m), where_(where) {}

  // Clusters run one after the other, in grid order. CTAs of different clusters may not wait for
  // each other.
  void run() {
    const Launch& l = m_.launch;
    for (u32 z = 0; z < l.grid[2]; z += l.cluster[2])
      for (u32 y = 0; y < l.grid[1]; y += l.cluster[1])
        for (u32 x = 0; x < l.grid[0]; x += l.cluster[0]) run_cluster(x, y, z);
  }

 private:
  void run_cluster(u32 x, u32 y, u32 z) {
    Cluster cluster;
    m_.cluster = &cluster;
    run_.new_cluster();
    const Launch& l = m_.launch;
    const u32 threads = l.block[0] * l.block[1] * l.block[2];
    const int per_cta = static_cast<int>((threads + kWarpSize - 1) / kWarpSize);
    const int ctas = static_cast<int>(l.cluster[0] * l.cluster[1] * l.cluster[2]);
    cluster.agents = std::make_unique<Agents>(per_cta * ctas, ctas, per_cta);
    cluster.engine = std::make_unique<Engine>(l.timing, m_.random, where_.line);
    for (int rank = 0; rank < ctas; ++rank) {
      auto cta = std::make_unique<Cta>();
      cta->cluster = &cluster;
      cta->rank = rank;
      const u32 r = static_cast<u32>(rank), cx = l.cluster[0], cy = l.cluster[1];
      cta->id[0] = x + r % cx;
      cta->id[1] = y + r / cx % cy;
      cta->id[2] = z + r / (cx * cy);
      cta->shared = std::make_unique<SharedMemory>(l.static_shared + l.dynamic_shared, rank);
      cta->tensor = std::make_unique<TensorMemory>(rank);
      cta->warps.resize(static_cast<size_t>(per_cta));
      for (int k = 0; k < per_cta; ++k) start(*cta, k, rank * per_cta + k, threads);
      cta->live_warps = static_cast<u32>(per_cta);
      cluster.ctas.push_back(std::move(cta));
    }
    warps_.clear();
    for (auto& cta : cluster.ctas)
      for (Warp& w : cta->warps) warps_.push_back(&w);
    if (l.order == Order::Backward) std::reverse(warps_.begin(), warps_.end());
    loop();
    where_ = {};
    while (cluster.engine->advance_any()) continue;
    for (const auto& cta : cluster.ctas)
      if (cta->tensor->any_allocated())
        throw Fault("protocol", "CTA " + std::to_string(cta->rank) +
                                    " exits without freeing its tensor memory");
    m_.cluster = nullptr;
  }

  void start(Cta& cta, int index, int global, u32 threads) {
    const Program& p = m_.program;
    const Launch& l = m_.launch;
    Warp& w = cta.warps[static_cast<size_t>(index)];
    w.cta = &cta;
    w.index = index;
    w.global = global;
    // Never-written registers hold a NaN pattern.
    w.storage.assign(static_cast<size_t>(p.slots) * kWarpSize + 16, 0xFFFFFFFF);
    const auto address = reinterpret_cast<uintptr_t>(w.storage.data());
    w.registers = reinterpret_cast<u32*>((address + 63) & ~uintptr_t{63});
    w.predicates.assign(static_cast<size_t>(p.predicates), 0);
    w.predicates[1] = kAllLanes;  // slots 0 and 1: false and true
    w.busy.assign(static_cast<size_t>(p.slots), kFree);
    const u32 first = static_cast<u32>(index) * kWarpSize;
    const u32 lanes = std::min<u32>(kWarpSize, threads - first);
    w.live = lanes == kWarpSize ? kAllLanes : (1u << lanes) - 1;
    w.splits.push_back({0, w.live, {}});
    for (const Initial& i : p.initial)
      for (u32 lane = 0; lane < kWarpSize; ++lane) {
        const u64 x = initial_value(cta, w, i, first + lane, lane, l);
        if (i.wide)
          w.r64(i.slot)[lane] = x;
        else
          w.r32(i.slot)[lane] = static_cast<u32>(x);
      }
  }

  static u64 initial_value(const Cta& cta, const Warp& w, const Initial& i, u32 thread, u32 lane,
                           const Launch& l) {
    const auto axis = [&](int first) { return static_cast<size_t>(i.special - first); };
    const auto within = [&](int first) { return i.special >= first && i.special < first + 3; };
    const u32 t[3] = {thread % l.block[0], thread / l.block[0] % l.block[1],
                      thread / (l.block[0] * l.block[1])};
    if (within(S_tid_x)) return t[axis(S_tid_x)];
    if (within(S_ntid_x)) return l.block[axis(S_ntid_x)];
    if (within(S_ctaid_x)) return cta.id[axis(S_ctaid_x)];
    if (within(S_nctaid_x)) return l.grid[axis(S_nctaid_x)];
    if (within(S_clusterid_x)) return cta.id[axis(S_clusterid_x)] / l.cluster[axis(S_clusterid_x)];
    if (within(S_nclusterid_x))
      return l.grid[axis(S_nclusterid_x)] / l.cluster[axis(S_nclusterid_x)];
    if (within(S_cluster_ctaid_x))
      return cta.id[axis(S_cluster_ctaid_x)] % l.cluster[axis(S_cluster_ctaid_x)];
    if (within(S_cluster_nctaid_x)) return l.cluster[axis(S_cluster_nctaid_x)];
    switch (i.special) {
      case S_cluster_ctarank: return static_cast<u64>(cta.rank);
      case S_cluster_nctarank: return l.cluster[0] * l.cluster[1] * l.cluster[2];
      case S_laneid: return lane;
      case S_warpid: return static_cast<u64>(w.index);
      case S_nwarpid: return 64;
      case S_smid: return (cta.id[0] + l.grid[0] * (cta.id[1] + l.grid[1] * cta.id[2])) % 132;
      case S_nsmid: return 132;
      case S_gridid: return 1;
      case S_lanemask_eq: return 1u << lane;
      case S_lanemask_lt: return (1u << lane) - 1;
      case S_lanemask_le: return (2ull << lane) - 1;
      case S_lanemask_gt: return ~((2ull << lane) - 1) & kAllLanes;
      case S_lanemask_ge: return ~((1ull << lane) - 1) & kAllLanes;
      case S_dynamic_smem_size: return l.dynamic_shared;
      case S_total_smem_size: return l.static_shared + l.dynamic_shared;
      case S_constant: return i.value;
      case S_shared_symbol:
        return static_cast<u64>(cta.rank) << 24 | (SharedMemory::kReserved + i.value);
      case S_parameter_symbol: return l.parameters + i.value;
      default: throw Fault("unsupported", "special register " + std::to_string(i.special));
    }
  }

  // -- scheduling
  // --------------------------------------------------------------------------------------------

  void loop() {
    size_t turn = 0;
    bool forced = false;
    while (true) {
      const size_t living = static_cast<size_t>(
          std::count_if(warps_.begin(), warps_.end(), [](const Warp* w) { return w->live != 0; }));
      if (living == 0) return;
      const u64 before = progress_;
      bool ran = false;
      if (m_.launch.order == Order::Random) {
        turn = m_.random.below(static_cast<u32>(warps_.size()));
        for (size_t k = 0; k < warps_.size() && !ran; ++k)
          ran = run_warp(*warps_[(turn + k) % warps_.size()], 1 + m_.random.below(64));
      } else {
        // The first warp that can run does so until it blocks; a long run lets the others in.
        for (size_t k = 0; k < warps_.size() && !ran; ++k) {
          ran = run_warp(*warps_[turn], 10000);
          if (!ran || ++streak_ > 8) turn = (turn + 1) % warps_.size(), streak_ = 0;
        }
        if (ran && progress_ == before) turn = (turn + 1) % warps_.size();
      }
      if (m_.launch.timing == Timing::Random && m_.random.below(4) == 0) advance();
      if (ran && ++since_async_ > 20000)
        advance();  // a kernel that polls memory must not stop the engine
      if (ran) {
        if (progress_ != before) forced = false;
        continue;
      }
      if (advance()) {
        forced = false;
        continue;
      }
      if (!forced && force_mixed_waits()) {
        forced = true;
        continue;
      }
      report_deadlock();
    }
  }

  bool advance() {
    since_async_ = 0;
    where_ = {};
    return m_.cluster->engine->advance_any();
  }

  bool force_mixed_waits() {
    bool any = false;
    for (Warp* w : warps_)
      for (Split& s : w->splits)
        if (s.wait.kind == Wait::OnMBarrier && (s.mask & (s.mask - 1))) {
          s.wait.token = ~u64{0};
          any = true;
        }
    return any;
  }

  bool runnable(Warp& w, Split& s) const {
    switch (s.wait.kind) {
      case Wait::None: return true;
      case Wait::OnMBarrier:
      case Wait::OnCluster:
      case Wait::OnAllocation: return s.wait.token != m_.cluster->events;
      case Wait::OnLanes: return (s.wait.detail & w.live & ~s.mask) == 0;
      default: {
        const NamedBarrier& b = w.cta->barriers[s.wait.detail];
        if (b.generation == s.wait.token) return false;
        w.knows.join(b.released);
        s.wait = {};
        return true;
      }
    }
  }

  // The runnable split with the lowest pc, after merging those that met; -1: none.
  int select(Warp& w) const {
    auto& splits = w.splits;
    if (splits.size() > 1) {
      for (size_t a = 0; a < splits.size(); ++a)
        for (size_t b = a + 1; b < splits.size();) {
          const bool parked =
              splits[a].wait.kind == Wait::OnBarrier || splits[b].wait.kind == Wait::OnBarrier;
          if (splits[a].pc == splits[b].pc && !parked) {
            splits[a].mask |= splits[b].mask;
            splits[a].wait = {};
            splits.erase(splits.begin() + static_cast<long>(b));
          } else {
            ++b;
          }
        }
    }
    int best = -1;
    for (size_t k = 0; k < splits.size(); ++k)
      if (runnable(w, splits[k]) &&
          (best < 0 || splits[k].pc < splits[static_cast<size_t>(best)].pc))
        best = static_cast<int>(k);
    return best;
  }

  bool run_warp(Warp& w, u32 quantum) {
    bool ran = false;
    for (u32 k = 0; k < quantum && w.live; ++k) {
      const int chosen = select(w);
      if (chosen < 0) break;
      ran = true;
      const auto split = static_cast<size_t>(chosen);
      const u32 pc = w.splits[split].pc;
      if (pc >= m_.program.code.size()) throw Fault("protocol", "runs past the end of the kernel");
      const Insn& i = m_.program.code[pc];
      where_ = {i.line, w.cta->rank, w.index};
      ++w.steps;
      if (++m_.steps > m_.launch.step_limit)
        throw Fault("limit",
                    "more than " + std::to_string(m_.launch.step_limit) + " instructions of warps");
      const Flow flow = run_.execute(w, split, i);
      if (flow == Flow::Blocked) continue;  // another split of the warp may go on
      ++progress_;
      ++m_.counts[pc];
      if (flow == Flow::Next || flow == Flow::Parked) ++w.splits[split].pc;
      if (flow == Flow::Next) w.splits[split].wait = {};
      if (flow == Flow::Gone && w.live == 0) finish(w);
    }
    return ran;
  }

  void finish(Warp& w) {
    Cta& cta = *w.cta;
    if (cta.live_warps == 1)
      for (Warp& other : cta.warps) m_.cluster->engine->drain(other.tensor);
    --cta.live_warps;
    cta.left.join(w.knows);
    if (cta.live_warps == 0) check_visitors(cta);
    run_.cluster_settle();
  }

  // Shared memory is there for other CTAs as long as its own has not exited, so one of its warps
  // must have heard, before it exits, of all that others have done in it.
  void check_visitors(const Cta& cta) {
    const Agents& agents = *m_.cluster->agents;
    for (const auto& [agent, epoch] : cta.visitors) {
      if (cta.left.all.get(agent) >= epoch) continue;
      const std::string text = "CTA " + std::to_string(cta.rank) +
                               " exits without waiting for what " + agents.name(agent) +
                               " did in its shared memory: another time it may come too late";
      if (agents.is_tensor(agent))
        m_.remark(text);  // a commit: see README, "Remarks"
      else
        throw Fault("protocol", text);
    }
  }

  [[noreturn]] void report_deadlock() {
    std::string text = "no warp can go on and nothing is pending:";
    for (const auto& cta : m_.cluster->ctas)
      for (const Warp& w : cta->warps)
        for (const Split& s : w.splits) {
          const Insn& i = m_.program.code[s.pc];
          text += "\n  CTA " + std::to_string(cta->rank) + " warp " + std::to_string(w.index) +
                  " lanes " + hex(s.mask) + " at line " + std::to_string(i.line) + ": ";
          switch (s.wait.kind) {
            case Wait::OnMBarrier:
              text += "waits for parity " + std::to_string(s.wait.detail2 & 1) + " of " +
                      mbarrier_state(*m_.cluster->ctas[s.wait.detail >> 24],
                                     s.wait.detail & kOffsetMask);
              break;
            case Wait::OnBarrier: {
              const NamedBarrier& b = cta->barriers[s.wait.detail];
              text += "waits at barrier " + std::to_string(s.wait.detail) + " (" +
                      std::to_string(b.arrived) + " of " + std::to_string(b.expected) + " threads)";
              break;
            }
            case Wait::OnCluster:
              text += "waits at the cluster barrier (" +
                      std::to_string(m_.cluster->barrier.arrived) + " warps have arrived)";
              break;
            case Wait::OnAllocation:
              text += "waits for " + std::to_string(s.wait.detail) + " columns of tensor memory";
              break;
            case Wait::OnLanes:
              text += "waits for lanes " + hex(s.wait.detail & ~s.mask) + " of its warp";
              break;
            default: text += "can run";
          }
        }
    where_ = {};
    throw Fault("deadlock", text);
  }

  Machine& m_;
  Interpreter run_;
  Where& where_;
  std::vector<Warp*> warps_;
  u64 progress_ = 0;
  u32 streak_ = 0, since_async_ = 0;
};

}  // namespace ptx

extern "C" {

struct AllocationRecord {
  uint64_t base, size, written;
  int32_t writable, unused;
  char name[64];
};

struct ProgramRecord {
  int64_t instructions, initials;
  int32_t slots, predicates;
  const int32_t*
      code;  // 12 fields each: op type type2 sub flags guard negate line first n first_use uses
  const int32_t* arguments;
  const int32_t* uses;
  const ptx::Initial* initial;
  const uint8_t* wide;
};

struct Report {
  char kind[32];
  char message[16384];
  char remarks[4096];  // one a line
  char work[8192];     // one a line: count, name
  int32_t line, cta, warp, unused;
  uint64_t steps;
};

// `layout`: the caller's sizes of the five structures, so that a stale caller is refused.
int ptx_run(const int64_t* layout, const ProgramRecord* record, const ptx::Launch* launch,
            const AllocationRecord* allocations, int64_t count, uint64_t* counts, Report* report) {
  const int64_t own[] = {sizeof(ProgramRecord), sizeof(ptx::Launch), sizeof(AllocationRecord),
                         sizeof(Report), sizeof(ptx::Initial)};
  if (!std::equal(own, own + 5, layout)) return 2;
  using namespace ptx;
  Program program;
  program.slots = record->slots;
  program.predicates = record->predicates;
  program.wide.assign(record->wide, record->wide + record->slots);
  program.initial.assign(record->initial, record->initial + record->initials);
  for (int64_t k = 0; k < record->instructions; ++k) {
    const int32_t* c = record->code + 12 * k;
    program.code.push_back({c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7],
                            record->arguments + c[8], c[9], record->uses + c[10], c[11]});
  }
  GlobalMemory global;
  for (int64_t k = 0; k < count; ++k) {
    const AllocationRecord& a = allocations[k];
    global.add({a.base, a.size, a.writable != 0, a.name, reinterpret_cast<u8*>(a.written)});
  }
  Machine machine(program, *launch, global);
  Where where;
  int failed = 0;
  try {
    Scheduler(machine, where).run();
  } catch (const Fault& f) {
    failed = 1;
    std::snprintf(report->kind, sizeof report->kind, "%s", f.kind.c_str());
    std::snprintf(report->message, sizeof report->message, "%s", f.what());
  } catch (const std::exception& e) {
    failed = 1;
    std::snprintf(report->kind, sizeof report->kind, "internal");
    std::snprintf(report->message, sizeof report->message, "%s", e.what());
  }
  std::string remarks;
  for (const auto& r : machine.remarks) remarks += r + "\n";
  std::snprintf(report->remarks, sizeof report->remarks, "%s", remarks.c_str());
  std::string work;
  for (const auto& [name, count] : machine.work) work += std::to_string(count) + " " + name + "\n";
  std::snprintf(report->work, sizeof report->work, "%s", work.c_str());
  report->line = where.line;
  report->cta = where.cta;
  report->warp = where.warp;
  report->steps = machine.steps;
  std::copy(machine.counts.begin(), machine.counts.end(), counts);
  return failed;
}
}
