// mbarrier objects (PTX ISA 9.7.13.15): phases, pending arrivals and transaction counts.
#pragma once

#include "alu.hpp"

namespace ptx {

inline constexpr i64 kMaxCount = (1 << 20) - 1;

inline MBarrier& mbarrier_at(Cta& cta, u32 offset, const char* what) {
  const auto found = cta.mbarriers.find(offset);
  if (found == cta.mbarriers.end())
    throw Fault("protocol", std::string(what) + " at " + cta.shared->place(offset) +
                                ", where no mbarrier has been initialised");
  return found->second;
}

// The same for a warp, which must know that it was initialised.
inline MBarrier& mbarrier_for(const Warp& w, Cta& cta, u32 offset, const char* what) {
  MBarrier& b = mbarrier_at(cta, offset, what);
  if (b.maker != agent_of(w, kGeneric) && w.knows.all.get(b.maker) < b.made &&
      w.knows.relaxed.get(b.maker) < b.made)
    throw Fault("race", std::string(what) + " at " + cta.shared->place(offset) +
                            ", an mbarrier that the " + cta.cluster->agents->name(b.maker) +
                            " initialised without a synchronisation in between");
  return b;
}

inline void mbarrier_init(Warp& w, Cta& cta, u32 offset, u32 count) {
  if (offset % 8)
    throw Fault("alignment",
                "mbarrier.init at " + cta.shared->place(offset) + ", not a multiple of 8");
  if (count < 1 || count > kMaxCount)
    throw Fault("protocol", "mbarrier.init with a count of " + std::to_string(count));
  cta.shared->hold_barrier(offset, generic_access(w, "mbarrier.init"));
  MBarrier& b = cta.mbarriers[offset];
  const int agent = b.agent;
  b = MBarrier{};
  b.expected = count;
  b.pending = count;
  b.maker = agent_of(w, kGeneric);
  b.made = w.epoch;
  b.agent = agent >= 0 ? agent
                       : w.cta->cluster->agents->add("copies that signal the mbarrier at " +
                                                     cta.shared->place(offset));
}

// A phase ends when nothing is pending: no arrival, no transaction (9.7.13.15.4 "Phase
// completion").
inline void mbarrier_settle(Machine& m, Cta& cta, u32 offset, MBarrier& b) {
  if (b.pending != 0 || b.transactions != 0) return;
  ++b.phase;
  b.pending = b.expected;
  b.done.join(b.arriving);
  b.arriving.clear();
  ++m.cluster->events;
  if (b.phase - b.seen > 1)
    throw Fault(
        "protocol",
        "the mbarrier at " + cta.shared->place(offset) + " completes phase " +
            std::to_string(b.phase) +
            " before any wait has seen the one before it: waits by parity cannot tell them apart");
}

inline void mbarrier_expect(Cta& cta, u32 offset, MBarrier& b, i64 bytes) {
  b.transactions += bytes;
  if (b.transactions > kMaxCount || b.transactions < -kMaxCount)
    throw Fault("protocol", "the transaction count of the mbarrier at " +
                                cta.shared->place(offset) + " is " +
                                std::to_string(b.transactions));
}

inline void mbarrier_arrive(Machine& m, Cta& cta, u32 offset, u32 count, const Knowledge& knows,
                            const char* what) {
  MBarrier& b = mbarrier_at(cta, offset, what);
  if (count < 1 || static_cast<i64>(count) > b.pending)
    throw Fault("protocol", std::string(what) + ": " + std::to_string(count) +
                                " arrivals on the mbarrier at " + cta.shared->place(offset) +
                                ", which waits for " + std::to_string(b.pending));
  b.pending -= count;
  b.arriving.join(knows);
  mbarrier_settle(m, cta, offset, b);
}

inline void mbarrier_complete(Machine& m, Cta& cta, u32 offset, u32 bytes, const Knowledge& knows,
                              const char* what) {
  MBarrier& b = mbarrier_at(cta, offset, what);
  mbarrier_expect(cta, offset, b, -static_cast<i64>(bytes));
  b.arriving.join(knows);
  mbarrier_settle(m, cta, offset, b);
}

inline std::string mbarrier_state(Cta& cta, u32 offset) {
  const auto found = cta.mbarriers.find(offset);
  if (found == cta.mbarriers.end())
    return "an mbarrier that was never initialised, " + cta.shared->place(offset);
  const MBarrier& b = found->second;
  return "the mbarrier at " + cta.shared->place(offset) + " (phase " + std::to_string(b.phase) +
         ", " + std::to_string(b.pending) + " of " + std::to_string(b.expected) + " arrivals and " +
         std::to_string(b.transactions) + " bytes pending)";
}

}  // namespace ptx
