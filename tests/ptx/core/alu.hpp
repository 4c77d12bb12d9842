// Instructions that touch only registers and predicates of one warp.
#pragma once

#include "arithmetic.hpp"
#include "bits.hpp"
#include "convert.hpp"

namespace ptx {

// False: not an instruction of this unit.
inline bool execute_alu(Warp& w, const Insn& i, u32 mask) {
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
    case ABS: execute_arithmetic(w, i, mask); return true;
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
    case COPYSIGN: execute_bits(w, i, mask); return true;
    case MOV:
    case SELP:
    case PACK:
    case UNPACK: execute_move(w, i, mask); return true;
    case SETP:
    case PMOV:
    case PNOT:
    case PAND:
    case POR:
    case PXOR: execute_predicate(w, i, mask); return true;
    case CVT:
    case CVT2:
    case CVT2F: execute_convert(w, i, mask); return true;
    case RCP:
    case SQRT:
    case RSQRT:
    case EX2:
    case LG2:
    case SIN:
    case COS:
    case TANH: execute_function(w, i, mask); return true;
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

}  // namespace ptx
