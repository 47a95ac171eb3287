"""The tree of a batch gives every row back, whatever is cut; and what is shared is shared wholly."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.backends.batching import Plans, balanced, balanced_trees, length_buckets, plan, row_cost
from rollgym.trainer.backends.prefix_cache import SharedTokens
from rollgym.trainer.backends.prefix_tree import CallCosts, finest_tree, paths_of, tree_of

FREE = CallCosts(pair=0.0, masked_pair=0.0, copied=0.0, call=0.0, held=0.0)
CHEAP = CallCosts(pair=0.001, masked_pair=0.002, copied=0.01, call=3.0, held=0.1, read=0.05)
DEAR = CallCosts(pair=0.01, masked_pair=0.02, copied=0.5, call=200.0, held=0.5)
COSTS = st.sampled_from([FREE, CHEAP, DEAR])


@st.composite
def batches(draw):
    """Rows, many of which go on from where others are, or end there."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 14))):
        start = draw(st.sampled_from(rows)) if rows and draw(st.booleans()) else []
        kept = start[: draw(st.integers(0, len(start)))]
        rows.append(kept + draw(st.lists(st.integers(0, 3), min_size=0 if kept else 1, max_size=25)))
    return [np.array(row, dtype=np.int64) for row in rows]


def ids_of_path(tree, path, rows):
    chain = [tree.segments[number] for number in tree.chain(path)]
    return np.concatenate([rows[segment.path][segment.start : segment.stop] for segment in chain])


@given(rows=batches())
def test_every_row_is_the_beginning_of_its_path_and_no_path_that_of_another(rows):
    paths = paths_of(rows)
    for row, path in zip(rows, paths.of_row, strict=True):
        assert np.array_equal(rows[paths.row[path]][: len(row)], row)
    whole = [rows[row].tolist() for row in paths.row]
    for number, path in enumerate(whole):
        others = whole[:number] + whole[number + 1 :]
        assert not any(other[: len(path)] == path for other in others)
    for number in range(1, len(whole)):
        common = paths.shared[number]
        one, two = whole[number - 1], whole[number]
        assert one[:common] == two[:common]
        assert one[common : common + 1] != two[common : common + 1]


@given(rows=batches())
def test_the_finest_tree_has_each_distinct_beginning_once(rows):
    paths = paths_of(rows)
    shared = finest_tree(paths, [len(rows[row]) for row in paths.row], FREE)
    beginnings = {tuple(row[: stop + 1].tolist()) for row in rows for stop in range(len(row))}
    assert shared.tree.tokens == len(beginnings)


@given(rows=batches(), budget=st.integers(1, 200), costs=COSTS, prefixes=st.booleans())
def test_a_plan_holds_every_row_once_and_gives_it_back(rows, budget, costs, prefixes):
    buckets = plan(rows, budget, costs, prefixes=prefixes)
    assert sorted(row for bucket in buckets for row in bucket.rows) == list(range(len(rows)))
    for bucket in buckets:
        if bucket.shared is None:
            continue
        tree, of_paths = bucket.shared.tree, [rows[row] for row in bucket.shared.paths]
        for row, path in zip(bucket.rows, bucket.shared.path_of, strict=True):
            assert np.array_equal(ids_of_path(tree, path, of_paths)[: len(rows[row])], rows[row])
        for path, ids in enumerate(of_paths):
            assert np.array_equal(ids_of_path(tree, path, of_paths), ids)
        read = costs.read * len(bucket.rows) * max(len(rows[row]) for row in bucket.rows)
        assert tree.held(costs) + read <= budget or len(of_paths) == 1
        assert prefixes or all(call.prefix == 0 for call in tree.calls)
        done = set()
        for call in tree.calls:
            segments = [tree.segments[number] for number in call.segments]
            assert {segment.parent for segment in segments} <= done | {-1}
            assert call.width == max(segment.stop - segment.start for segment in segments)
            assert call.prefix == max(segment.start for segment in segments)
            done |= set(call.segments)
        assert sorted(done) == list(range(len(tree.segments)))


@given(rows=batches(), budget=st.integers(1, 200), costs=COSTS)
def test_a_plan_costs_clearly_less_than_rows_as_they_are_or_is_not_made(rows, budget, costs):
    lengths = [len(row) for row in rows]
    flat = length_buckets(lengths, budget)
    buckets = plan(rows, budget, costs)
    if buckets[0].shared is None:
        assert [list(bucket.rows) for bucket in buckets] == flat
        return
    sizes = np.array([(len(bucket), max(lengths[row] for row in bucket), 0) for bucket in flat], dtype=float)
    assert sum(bucket.shared.tree.cost(costs) for bucket in buckets) < 0.95 * costs.of(*sizes.T).sum()


@given(rows=batches(), costs=COSTS, data=st.data())
def test_each_distinct_token_with_a_result_is_computed_once_and_given_to_every_row(rows, costs, data):
    wanted = [
        np.array(sorted(data.draw(st.sets(st.integers(1, len(row) - 1)))), dtype=np.int64)
        if len(row) > 1
        else np.zeros(0, dtype=np.int64)
        for row in rows
    ]
    paths = paths_of(rows)
    shared = finest_tree(paths, [len(rows[row]) for row in paths.row], costs)
    of_paths = [rows[row] for row in shared.paths]
    tokens = SharedTokens.of(shared, of_paths, wanted, torch.device("cpu"))

    # What the call's rows stand behind, by ids in place of keys and values.
    beginnings, flat = [], []
    for call in tokens.calls:
        flat.append(call.ids.flatten())
        for row in range(call.ids.shape[0]):
            before = torch.zeros(0, dtype=torch.int64)
            if call.prefix is not None:
                before = torch.cat([flat[source] for source in call.prefix.sources])[call.prefix.index[row]]
                if call.prefix.mask is not None:
                    before = before[call.prefix.mask[row, : len(before)]]
                assert call.positions[row, 0] == len(before)
            beginnings.append([before, call])
    states = []
    first = 0
    for call in tokens.calls:
        for place in call.states.tolist():
            row, column = divmod(place, call.ids.shape[1])
            before = beginnings[first + row][0].tolist()
            states.append(tuple(before + call.ids[row, : column + 1].tolist()))
        first += call.ids.shape[0]
    distinct = [(*state, target) for state, target in zip(states, tokens.targets.tolist(), strict=True)]
    expected = [
        tuple(row[: column + 1].tolist())
        for row, columns in zip(rows, wanted, strict=True)
        for column in columns
    ]
    assert [distinct[number] for number in tokens.which.tolist()] == expected
    assert len(distinct) == len(set(distinct)) == len(set(expected))


@pytest.mark.parametrize(
    ("call", "segments"), [(0.0, 3), (1e5, 2)], ids=["calls for nothing", "calls that are dear"]
)
def test_a_prefix_is_shared_where_that_pays(call, segments):
    costs = CallCosts(pair=0.0, masked_pair=0.0, copied=0.0, call=call, held=0.0)
    assert len(tree_of([40, 50], [0, 30], costs).segments) == segments


def test_attention_that_costs_more_than_the_tokens_saved_is_not_shared():
    # Behind a prefix all keys are looked at, without one only half: long branches lose more than a short prefix saves.
    costs = CallCosts(pair=0.01, masked_pair=0.04, copied=0.0, call=0.0, held=0.0)
    assert len(tree_of([130, 130], [0, 100], costs).segments) == 3
    assert len(tree_of([1000, 1000], [0, 100], costs).segments) == 2


def test_a_tree_larger_than_the_budget_is_cut_where_least_is_shared():
    draws = np.random.default_rng(0)
    prompts = [draws.integers(0, 99, 40) for _ in range(2)]
    rows = [np.concatenate([prompt, draws.integers(0, 99, 30)]) for prompt in prompts for _ in range(3)]
    buckets = plan(rows, 180, FREE)  # one group takes 130
    assert sorted(sorted(bucket.rows) for bucket in buckets) == [[0, 1, 2], [3, 4, 5]]
    assert [bucket.shared.tree.tokens for bucket in buckets] == [130, 130]
    # Where a group alone is too large, its prompt goes through the model once for each part.
    assert [bucket.shared.tree.tokens for bucket in plan(rows[:3], 100, FREE)] == [100, 70]


def test_planning_long_combs_takes_no_depth_of_recursion():
    rows = [np.concatenate([np.zeros(length, dtype=np.int64), [1, length]]) for length in range(1, 1100)]
    assert sum(len(bucket.rows) for bucket in plan(rows, 16384, CHEAP)) == len(rows)


@given(rows=batches(), parts=st.integers(1, 5))
def test_rows_are_divided_over_ranks_along_their_trees(rows, parts):
    divided = balanced_trees(rows, 16, parts)
    assert sorted(row for part in divided for row in part) == list(range(len(rows)))
    assert len(divided) == parts
    costs = [row_cost(len(row), 16) for row in rows]
    apart = max(sum(costs[row] for row in part) for part in balanced(costs, parts))
    assert max(_cost_of_tree([rows[row] for row in part]) for part in divided) <= apart


def _cost_of_tree(rows):
    paths = paths_of(rows)
    whole = sum(row_cost(len(rows[row]), 16) for row in paths.row)
    return whole - sum(row_cost(shared, 16) for shared in paths.shared)


def test_groups_stay_together_in_a_rank():
    prompts = [[1] * 40, [2] * 40]
    rows = [np.array([*prompts[row % 2], 3, row], dtype=np.int64) for row in range(8)]
    assert balanced_trees(rows, 16, 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]


@given(rows=batches(), others=batches(), costs=COSTS, budget=st.integers(1, 120), most=st.integers(1, 4))
def test_a_plan_is_made_once_and_is_that_of_its_rows(rows, others, costs, budget, most):
    plans = Plans(most)
    first = plans.plan(rows, budget, costs)
    assert first == plan(rows, budget, costs)
    assert plans.plan([row.copy() for row in rows], budget, costs) is first
    assert plans.plan(others, budget, costs) == plan(others, budget, costs)
    assert plans.plan(rows, budget + 1, costs) == plan(rows, budget + 1, costs)
    assert plans.plan(rows, budget, costs, prefixes=False) == plan(rows, budget, costs, prefixes=False)
    # The same tokens in other rows are other rows.
    together = [np.concatenate(rows)]
    assert plans.plan(together, budget, costs) == plan(together, budget, costs)


def test_no_more_plans_are_kept_than_are_asked_for():
    plans = Plans(2)
    one, two, three = ([np.arange(size), np.arange(size + 3)] for size in (4, 5, 6))
    first, second = plans.plan(one, 100, CHEAP), plans.plan(two, 100, CHEAP)
    assert plans.plan(one, 100, CHEAP) is first
    plans.plan(three, 100, CHEAP)
    assert plans.plan(one, 100, CHEAP) is first, "it was asked for later than the other"
    assert plans.plan(two, 100, CHEAP) is not second
