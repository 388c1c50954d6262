"""DAPO's step: which groups are sampled, kept and trained on, and what becomes of long responses."""

from dataclasses import replace

import numpy as np
import pytest
from made_steps import Made, rollout_of

from jaxrlhf.batch import images_of_problems
from jaxrlhf.config import DAPO, OverlongPunishment, PolicyLoss

PLAIN = DAPO(responses_per_update=4, overlong=None)
WIDTH = 10


def answers(scores: dict[int, tuple[float, float]], lengths: dict[int, tuple[int, int]] | None = None) -> Made:
    """Two responses to each prompt, whose scores and lengths are given by the prompt; cut off at the full width."""

    def generate(problems, copies):
        length_B = [n for one in problems for n in (lengths or {}).get(one.prompt_id, (3, 3))]
        mask_BT = np.arange(WIDTH)[None] < np.asarray(length_B)[:, None]
        ids = np.repeat([one.prompt_id for one in problems], copies)
        return rollout_of(mask_BT, ids, truncated_B=np.asarray(length_B) == WIDTH)

    def score(rollout):
        ids = np.asarray(rollout.sequences.prompt_id_B)
        return [scores[int(one)][row % 2] for row, one in enumerate(ids)]

    return Made(generate, score)


def trained(made: Made) -> dict[int, np.ndarray]:
    """Advantages of the trained tokens, by prompt."""
    found: dict[int, list] = {}
    for batch in made.minibatches:
        for row, mask in enumerate(np.asarray(batch.sequences.mask_BT)):
            if mask.any():
                prompt = int(batch.sequences.prompt_id_B[row])
                found.setdefault(prompt, []).append(float(batch.fields["advantage"][row][mask][0]))
    return {prompt: np.sort(values) for prompt, values in found.items()}


def test_flat_groups_are_replaced_by_further_ones_until_the_batch_is_full():
    made = answers({0: (1, 1), 1: (1, 0), 2: (0, 0), 3: (0, 0), 4: (0, 1), 5: (1, 0)})
    result, left = made.step(PLAIN, prompts=2, copies=2, more=[2, 3, 4, 5, 6, 7])
    assert [ids for ids, _, _ in made.asked] == [(0, 1), (2, 3), (4, 5)]
    assert left == 2  # what was not needed is not sampled
    assert set(trained(made)) == {1, 4}  # the surplus is dropped, not the first that came
    assert len(made.minibatches) == 1
    for name, value in {"generated": 6, "kept": 2, "flat_fraction": 0.5}.items():
        assert result.metrics[f"group/{name}"] == value
    assert result.metrics["score/mean"] == 0.5
    assert result.metrics["score/generated_mean"] == pytest.approx(5 / 12)
    assert result.metrics["tokens/generated"] == 36
    assert [one.prompt_id for one in made.collected.problems] == [1, 4]
    assert made.collected.rollout.sequences.prompt_id_B.tolist() == [1, 1, 4, 4]


def test_no_update_is_made_on_minibatches_of_fillers_alone():
    settings = replace(PLAIN, responses_per_update=1, epochs_per_step=2, max_rounds=1)
    made = answers({0: (1, 1), 1: (1, 0)})
    made.step(settings, prompts=2, copies=2)
    assert [int(batch.sequences.prompt_id_B[0]) for batch in made.minibatches] == [1] * 4
    assert set(trained(made)) == {1}


def test_one_minibatch_is_left_where_nothing_is_trained_on():
    made = answers({0: (0, 1), 1: (1, 0)}, {0: (WIDTH, WIDTH), 1: (WIDTH, WIDTH)})
    made.step(replace(PLAIN, responses_per_update=1, mask_truncated=True), prompts=2, copies=2)
    [batch] = made.minibatches
    assert not batch.sequences.mask_BT.any()


def test_where_all_groups_have_spread_nothing_more_is_sampled():
    made = answers({0: (1, 0), 1: (0, 1)})
    result, left = made.step(PLAIN, prompts=2, copies=2, more=[2, 3])
    assert (len(made.asked), left) == (1, 2)
    assert result.metrics["group/flat_fraction"] == 0


def test_rounds_are_bounded_and_what_is_missing_is_left_out_of_the_update():
    made = answers({0: (1, 1), 1: (1, 0), 2: (0, 0), 3: (0, 0), 4: (1, 0), 5: (1, 0)})
    result, left = made.step(replace(PLAIN, max_rounds=2), prompts=2, copies=2, more=[2, 3, 4, 5])
    assert (len(made.asked), left) == (2, 2)
    assert set(trained(made)) == {1}
    assert result.metrics["group/kept"] == 1
    weight, mask = made.rows("weight"), made.rows("mask")
    assert mask.any(axis=1).sum() == 2 and not weight[~mask].any()
    assert weight.sum() == pytest.approx(1)  # the mean over what is trained, not over the size of a full batch


def test_a_batch_in_which_nothing_differs_is_refused_with_what_to_do():
    made = answers(dict.fromkeys(range(4), (1, 1)))
    with pytest.raises(ValueError, match=r"^none of 4 prompts got responses with differing scores.*max_rounds=2"):
        made.step(replace(PLAIN, max_rounds=2), prompts=2, copies=2, more=[2, 3])
    assert not made.minibatches


def test_a_prompt_that_is_sampled_again_in_one_step_is_one_group():
    made = answers({0: (1, 0), 1: (0, 0), 2: (1, 0)})
    result, _ = made.step(PLAIN, prompts=2, copies=2, more=[1, 0, 0, 2])
    assert [ids for ids, _, _ in made.asked] == [(0, 1), (1, 0), (0, 2)]
    assert result.metrics["group/generated"] == 3
    assert made.collected.rollout.sequences.prompt_id_B.tolist() == [0, 0, 2, 2]


def test_scores_of_all_that_was_sampled_are_known_as_they_were_before_the_punishment():
    """An online band is to leave out prompts that were sampled and dropped, which score all alike."""
    settings = replace(PLAIN, overlong=OverlongPunishment(buffer_share=0.5, factor=0.5))
    made = answers({0: (1, 1), 1: (1, 0), 2: (0, 0), 3: (1, np.nan), 4: (np.nan, np.nan), 5: (0, 1)})
    made.step(settings, prompts=2, copies=2, more=[2, 3, 4, 5], max_response_tokens=4)
    known = {prompt: score for prompt, score in made.collected.generated_scores.items() if np.isfinite(score)}
    assert known == {0: 1.0, 1: 0.5, 2: 0.0, 3: 1.0, 5: 0.5}


def test_spread_is_that_of_scorable_responses():
    made = answers({0: (1, np.nan), 1: (1, 0), 2: (np.nan, np.nan), 3: (0, 1)})
    result, _ = made.step(PLAIN, prompts=2, copies=2, more=[2, 3])
    assert set(trained(made)) == {1, 3}
    assert result.metrics["score/generated_mean"] == pytest.approx(3 / 5)


def test_long_responses_are_punished_in_the_score_and_not_in_the_choice_of_groups():
    # Of at most 10 tokens the last 5 are the buffer: 8 tokens cost 3/5 of 0.5, 10 cost 0.5.
    settings = replace(PLAIN, overlong=OverlongPunishment(buffer_share=0.5, factor=0.5))
    made = answers({0: (1, 1), 1: (1, 0), 2: (1, 0)}, {0: (5, 10), 1: (8, 10), 2: (5, 5)})
    result, _ = made.step(settings, prompts=2, copies=2, more=[2, 0], max_response_tokens=10)
    assert set(trained(made)) == {1, 2}  # group 0 differs by its lengths alone
    np.testing.assert_allclose(made.collected.scores.score_B, [0.7, -0.5, 1, 0], rtol=1e-6)
    assert result.metrics["score/overlong"] == pytest.approx(-0.2)
    assert result.metrics["score/made"] == 0.5
    spread = 1 / np.sqrt(2)
    np.testing.assert_allclose(trained(made)[1], [-spread, spread], rtol=1e-4)


def test_truncated_responses_stay_in_the_baseline_when_they_are_masked():
    made = answers({0: (1, 0), 1: (0, 1)}, {0: (3, WIDTH), 1: (3, 3)})
    made.step(replace(PLAIN, mask_truncated=True), prompts=2, copies=2)
    np.testing.assert_allclose(made.rows("mask").any(axis=1), [True, False, True, True])
    np.testing.assert_allclose(trained(made)[0], [1 / np.sqrt(2)], rtol=1e-4)
    assert made.rows("weight")[0].sum() == pytest.approx(1 / 3)


def test_the_paper_is_the_default():
    assert DAPO().policy == PolicyLoss(clip_low=0.2, clip_high=0.28, aggregation="token-mean")
    assert (DAPO().kl, DAPO().overlong) == (None, OverlongPunishment(buffer_share=4096 / 20480, factor=1.0))


def test_rounds_of_prompts_with_images_and_without_make_one_batch():
    made = answers({0: (1, 1), 1: (1, 0)})
    draw = made.generate

    def pictured(problems, copies):
        rollout = draw(problems, copies)
        shown = [replace(one, images=("a picture",) * (one.prompt_id == 0)) for one in problems for _ in range(copies)]
        return replace(rollout, sequences=replace(rollout.sequences, images_B=images_of_problems(shown)))

    made.generate = pictured
    made.step(replace(PLAIN, responses_per_update=2), prompts=1, copies=2, more=[1])
    assert made.collected.rollout.sequences.images_B.tolist() == [(), ()]
