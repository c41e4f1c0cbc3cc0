/* Commit and delete, written apart from the tables in Python: a second opinion, for Spin.
 *
 * One attempt with two ranks, without thinning. Each step on the store is atomic; a process may stop for ever at any step, because no
 * process is obliged to go on. A lost reply is a choice after each create. -DMUTANT=n leaves out one rule.
 *
 *   1: the outcome is overwritten    2: no look after the lease      3: no look for holds before the sweep
 *   4: no fate                       5: a lost reply is a failure    6: data is deleted before the abort
 */
#ifndef MUTANT
#define MUTANT 0
#endif

mtype = { none, committed, aborted, swept, takenback };

bool shard[2], receipt[2], tombstone, tombstoned, lease, reading, undeleted;
bool saw_commit, saw_abort;
mtype outcome = none, fate = none;

#define visible (outcome == committed && !tombstone)
#define whole (shard[0] && shard[1])

proctype Rank(byte r) {
  shard[r] = true;
  receipt[r] = true
}

/* The saver of rank 0, the daemon, the next trainer. */
proctype Committer() {
  mtype seen;
  receipt[0] && receipt[1];
  do
  :: d_step { seen = outcome;
#if MUTANT == 1
       seen = none; outcome = committed
#else
       if :: outcome == none -> outcome = committed :: else fi
#endif
     };
     if
     :: break                              /* won or refused, or the reply is lost: read it back */
#if MUTANT == 5
     :: saw_abort = true; goto done
#endif
     fi
  od;
  if
  :: outcome == committed -> saw_commit = true
  :: outcome == aborted -> saw_abort = true
  fi;
done: skip
}

proctype Collector() {
#if MUTANT != 6
  if
  :: d_step { outcome == none -> outcome = aborted }
  :: outcome != none
  fi;
  outcome == aborted;
  saw_abort = true;
#else
  outcome == none;
#endif
  receipt[0] = false; receipt[1] = false;
  shard[0] = false; shard[1] = false
}

proctype Deleter() {
  visible;
  !lease;
  d_step { tombstone = true; tombstoned = true };
  if
  :: !lease                                /* hidden; a sweeper may come */
  :: lease ->                              /* held: take the own tombstone back */
     d_step { if :: fate == none -> fate = takenback :: else fi };
     if
     :: fate == takenback -> tombstone = false
     :: else
     fi
  fi
}

proctype Undeleter() {
  tombstone;
#if MUTANT == 4
  tombstone = false; undeleted = true
#else
  d_step { if :: fate == none -> fate = takenback :: else fi };
  if
  :: fate == takenback -> tombstone = false; undeleted = true
  :: else
  fi
#endif
}

proctype Sweeper() {
  tombstone;
#if MUTANT != 3
  !lease;
#endif
#if MUTANT != 4
  d_step { if :: fate == none -> fate = swept :: else fi };
  fate == swept;
#endif
  outcome = none;
  receipt[0] = false; receipt[1] = false;
  shard[0] = false; shard[1] = false
}

proctype Reader() {
  visible;
  lease = true;
#if MUTANT != 2
  if
  :: tombstone -> lease = false; goto done
  :: else
  fi;
#endif
  reading = true;
  d_step { reading = false; lease = false };
done: skip
}

/* The invariants, in every state. */
active proctype Monitor() {
end: atomic {
    ((visible && !whole) || (reading && !whole) || (saw_commit && saw_abort && !tombstoned)
      || (saw_commit && !tombstoned && !visible) || (undeleted && !visible && !tombstone)) -> assert(false)
  }
}

init {
  atomic {
    run Rank(0); run Rank(1); run Committer(); run Committer(); run Collector();
    run Deleter(); run Undeleter(); run Sweeper(); run Reader()
  }
}
