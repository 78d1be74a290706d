// Find the sequence that a threadgroup works for.
//
// The batch is packed: sequence i has the query tokens cu_seqlens_q[i] ..
// cu_seqlens_q[i + 1] - 1. A threadgroup knows only its position in the grid. The resolvers
// differ in indexing, never in arithmetic, so their outputs are bit-identical.
// Pointers are template parameters: MLX declares inputs of fewer than 8 elements
// `constant`, longer ones `device`.

enum Resolver {
  BINARY_SEARCH = 1,  // search cu_seqlens_q here
  SEQ_MAP = 2,        // load from a map that the host built
  IDENTITY = 3,       // one query token per sequence: token t belongs to sequence t
  PADDED_GRID = 4,    // the grid's z axis is the sequence; some threadgroups are surplus
  WORK_PLAN = 5       // the host lists (sequence, first row) for every threadgroup
};

// The work of a threadgroup. If seq is negative, the threadgroup is surplus and exits.
struct Work {
  int seq;
  int row;         // first query row, counted within the sequence
  int iterations;  // of the search
};

// The largest i with cu_seqlens_q[i] <= token.
template <typename Prefix>
inline int find_seq_idx(Prefix cu_seqlens_q, int token, int num_seqs, thread int& iterations) {
  int lo = 0;
  int hi = num_seqs;
  while (lo < hi) {
    int mid = (lo + hi + 1) / 2;
    if (cu_seqlens_q[mid] <= token) {
      lo = mid;
    } else {
      hi = mid - 1;
    }
    iterations++;
  }
  return lo;
}

// Where sequence i's Q-blocks begin. Each sequence has len / BQ full blocks and at most one
// ragged one; the + i counts the ragged ones, so one array serves tokens and Q-blocks.
template <int BQ, typename Prefix>
inline int first_qblock(Prefix cu_seqlens_q, int i) {
  return cu_seqlens_q[i] / BQ + i;
}

// The largest i whose Q-blocks begin at or before qblock.
template <int BQ, typename Prefix>
inline int find_seq_idx_of_qblock(Prefix cu_seqlens_q, int qblock, int num_seqs,
                                  thread int& iterations) {
  int lo = 0;
  int hi = num_seqs;
  while (lo < hi) {
    int mid = (lo + hi + 1) / 2;
    if (first_qblock<BQ>(cu_seqlens_q, mid) <= qblock) {
      lo = mid;
    } else {
      hi = mid - 1;
    }
    iterations++;
  }
  return lo;
}

// The work of one threadgroup; a unit is a query token (BQ = 1) or a Q-block of BQ rows.
// `unit` is the grid's y, `seq_axis` its z (PADDED_GRID only).
template <int RESOLVER, int BQ, typename Prefix, typename Lookup>
inline Work resolve(Prefix cu_seqlens_q, Lookup lookup, int num_seqs, int unit, int seq_axis) {
  int seq;
  int row;
  int iterations = 0;
  if (RESOLVER == PADDED_GRID) {
    seq = seq_axis;
    row = unit * BQ;
  } else if (RESOLVER == WORK_PLAN) {
    seq = lookup[2 * unit];
    row = lookup[2 * unit + 1];
  } else {
    if (RESOLVER == IDENTITY) {
      seq = unit;
    } else if (RESOLVER == SEQ_MAP) {
      seq = lookup[unit];
    } else if (BQ == 1) {
      seq = find_seq_idx(cu_seqlens_q, unit, num_seqs, iterations);
    } else {
      seq = find_seq_idx_of_qblock<BQ>(cu_seqlens_q, unit, num_seqs, iterations);
    }
    if (seq < 0) {
      return {seq, 0, iterations};  // the map's sentinel
    }
    const int first = (BQ == 1) ? cu_seqlens_q[seq] : first_qblock<BQ>(cu_seqlens_q, seq);
    row = (unit - first) * BQ;
  }
  const int rows = cu_seqlens_q[seq + 1] - cu_seqlens_q[seq];
  if (row < 0 || row >= rows) {
    seq = -1;  // past the sequence's last row
  }
  return {seq, row, iterations};
}
