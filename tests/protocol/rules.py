"""The rules of the protocol. Each can be left out: then the search must find the failure that it prevents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """All True: the protocol. Comments name the decision that has the failing sequence."""

    outcome_is_create_only: bool = True  # 1
    """Committers and collectors create the outcome; False: they overwrite it."""
    abort_before_deleting: bool = True  # 1, sequence 2
    """A collector creates the outcome as aborted before it deletes a byte."""
    lost_reply_is_read_back: bool = True  # 1, sequence 1
    """After a lost reply the outcome is read; False: a lost reply is a failed commit."""
    refusal_is_read_back: bool = True  # 1
    """After a refusal the outcome is read; False: the outcome that exists is taken for a committed one."""
    reader_looks_after_its_lease: bool = True  # 1
    deleter_looks_after_its_tombstone: bool = True  # 1, sequence 4
    sweeper_looks_for_holds: bool = True  # 12
    clock_is_probed: bool = True  # 12, sequence 5
    """A sweeper whose clock is wrong stops; False: it takes live leases for expired ones."""
    own_tombstone_for_each_deletion: bool = True  # 12, sequence 3
    fate_decides: bool = True  # 12, sequences 1 and 2
    """Sweep and undelete create the fate of the tombstone; False: each looks and acts."""
    withdrawal_needs_fate: bool = True  # 1, sequence 4
    """A deleter that finds a hold takes its tombstone back by a fate; False: it removes its tombstone."""
    tombstones_listed_after_outcomes: bool = True  # format.md, 2
    tombstone_before_sweep: bool = True  # 12
    """A sweep deletes only under a tombstone; False: it begins with the data."""
    tombstone_read_after_fate: bool = True  # 27
    """Sweep and undelete obey a fate that they created only if the tombstone is still there."""
    forget_tombstone_before_fate: bool = True  # 12
    forget_after_data: bool = True  # 12
    """A tombstone is forgotten only when nothing of the attempt is left."""
    marks_before_check: bool = True  # 18, sequences 2 and 4
    base_is_checked: bool = True  # 18
    """A committer looks for tombstones and outcomes of what it references."""
    base_may_be_dead: bool = True  # 27
    """It looks at the list of the dead as well."""
    marks_until_data_is_gone: bool = True  # 18, sequence 3
    hidden_readers_keep_data: bool = True  # 18
    """A deleter ignores marks of hidden checkpoints, a sweeper does not; False: neither counts them."""
    ends_earlier_saves: bool = True  # 25
    """Who commits the last save of a step aborts earlier ones that are not decided, before."""
    numbered_generations: bool = True  # 25
    """`latest` is in the newest generation; False: it is the highest step."""
    generation_is_create_only: bool = True  # 25
    dead_are_listed: bool = True  # 25
    """Expired tombstones are replaced by a list of the dead, which readers obey; False: they expire."""
    aborted_are_listed: bool = True  # 25
    """An aborted outcome is replaced by the list as well; False: it expires."""
    dead_before_tombstone: bool = True  # 25
    """The list is created before the tombstone is removed."""
    dead_read_after_create: bool = True  # 25
    """A committer looks at the list after it created the outcome."""
    dead_read_last: bool = True  # 25
    """A reader reads the list after the tombstones."""
    dead_read_after_lease: bool = True  # 27
    """Who has written a lease or a pin reads the list again, after the tombstones."""
    version_is_create_only: bool = True  # 25
    version_has_the_last_one: bool = True  # 25
    """A version has all attempts of the version before it."""
    versions_are_listed_again: bool = True  # 27
    """After the create of a version, the highest one counts; False: the one created."""
    receipts_deleted_first: bool = True  # 1
    resumer_looks_after_its_lease: bool = True  # 44
    """Who needs optimizer state looks for a thinning after it has written its lease."""
    thinned_before_thinning: bool = True  # 44
    """The object that says that a checkpoint is thinned is written before the thinning's tombstone is removed."""
    thinned_read_after_fate: bool = True  # 44
    """An undelete that has decided looks whether the checkpoint is thinned."""
    optimizer_marks: bool = True  # 44
    """References to optimizer state have marks of their own; False: thinning sees no marks."""
    base_may_be_thinned: bool = True  # 44
    """A committer looks for a thinning of what it references optimizer state of."""
