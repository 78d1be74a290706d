"""Attention metadata: it never changes, and a decode step may advance the last step's."""

import dataclasses

import numpy as np
import pytest

from labkit.engine import attention

DECODE = [(1, 20), (1, 40)]


@pytest.fixture
def plan(make_batch):
    """A function that plans a batch on one backend, with changes, as an engine does."""
    batch = make_batch(DECODE)
    backend = attention.create(resolver="work_plan")
    backend.adopt([batch.k_pool], [batch.v_pool])
    backend.advances_metadata = True

    def plan(lengths=(20, 40), tables=batch.block_tables, starts=(0, 1, 2), **options):
        return backend.plan(
            block_tables=np.array(tables, np.int32),
            seq_lens=np.array(lengths, np.int32),
            cu_seqlens_q=np.array(starts, np.int32),
            **options,
        )

    plan.backend, plan.batch = backend, batch
    return plan


def test_the_batch_cannot_be_changed(plan):
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().total_q = 3


def test_decodes_of_the_same_sequences_share_tables_and_prepared_launches(plan):
    first = plan()
    second = plan((21, 41), total_q=2)
    assert second.block_tables is first.block_tables
    assert second.prepared is first.prepared
    assert second.launches is not first.launches
    assert second.seq_lens.tolist() == [21, 41] and second.max_seq_len == 41
    assert first.seq_lens.tolist() == [20, 40]
    # What depends on the contexts is new: the longest sequence comes first in the work plan.
    assert plan((22, 5)).lookup.tokens[0].tolist() == [0, 0]
    assert second.lookup.tokens[0].tolist() == [1, 0]
    assert second.slot_mapping.tolist() == [
        int(plan.batch.block_tables[s, n // 16]) * 16 + n % 16 for s, n in ((0, 20), (1, 40))
    ]


@pytest.mark.parametrize("name", ["tables", "starts", "lengths"])
def test_another_batch_is_built_anew(plan, name):
    tables = plan.batch.block_tables.copy()
    tables[0, 0], tables[1, 0] = tables[1, 0], tables[0, 0]
    changes = {"tables": tables, "starts": (0, 2, 3), "lengths": (20, 0)}
    first = plan()
    if name == "lengths":
        with pytest.raises(ValueError, match=r"seq_lens\[1\] is 0, less than .* which is 1"):
            plan(changes[name])
        return
    second = plan(**{name: changes[name]})
    assert second.prepared is not first.prepared
    assert second.block_tables is not first.block_tables


def test_metadata_that_was_advanced_is_checked_as_any_other(plan):
    plan()
    with pytest.raises(ValueError, match=r"seq_lens\[1\] is 49 and needs 4 blocks of 16"):
        plan((20, 49))
    with pytest.raises(ValueError, match="cu_seqlens_q ends at 2, not at total_q=3"):
        plan(total_q=3)


def test_a_table_with_ids_beyond_the_pools_is_never_advanced(plan):
    tables = plan.batch.block_tables.copy()
    tables[0, 2] = 99  # sequence 0 needs two blocks yet
    plan(tables=tables)
    plan((21, 41), tables=tables)
    with pytest.raises(ValueError, match="block id 99; ids must be below"):
        plan((33, 41), tables=tables)


def test_a_kernel_workload_builds_metadata_each_time(plan):
    plan.backend.advances_metadata = False
    assert plan().block_tables is not plan().block_tables
