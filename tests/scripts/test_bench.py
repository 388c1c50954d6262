"""The benchmarks measure one model on one workload, and keep what was measured before."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxrlhf import models
from jaxrlhf.data.tokenizer import embedded_tokenizer
from scripts import pages
from scripts.benchmarks import chat_workload as chat
from scripts.benchmarks import compare_peers, peers_report
from scripts.benchmarks import workload as bench

MODULE = sys.executable, "-m"
TAIL = replace(bench.PRESETS["tail"], vocab=1024)
"""Model as deep and wide as the real one: what layers add to the stream must not change how often a response ends."""


def log_probabilities(place, token_RW):
    """Ours, from the checkpoint."""
    config = models.read_config(place)
    params = models.load_params(place, config, "lm")
    position_RW = np.broadcast_to(np.arange(token_RW.shape[1], dtype=np.int32), token_RW.shape)
    hidden_RWD = models.hidden_states(
        params, config, token_RW, position_RW, np.ones(token_RW.shape, np.int32)
    ).hidden_RWD
    return np.asarray(jax.nn.log_softmax(jnp.asarray(models.logits(params, config, hidden_RWD)), axis=-1))


def tokens(shape, vocab):
    return np.random.default_rng(0).integers(2, vocab, shape, dtype=np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("preset", [bench.PRESETS["tiny"], TAIL, bench.Preset(64, 2, 4, 2, 128, 512, tied=True)])
def test_a_checkpoint_is_the_same_model_in_transformers(preset, tmp_path, monkeypatch):
    monkeypatch.setitem(bench.PRESETS, "made", preset)
    place = bench.checkpoint("made", tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    token_RW = tokens((2, 24), preset.vocab)
    with torch.no_grad():
        logits_RWV = theirs(torch.tensor(token_RW, dtype=torch.long)).logits
    expected = torch.log_softmax(logits_RWV, dim=-1).numpy()
    np.testing.assert_allclose(log_probabilities(place, token_RW), expected, atol=1e-5)
    assert theirs.generation_config.eos_token_id is None, "nothing but the tokenizer may say what ends a response"


def test_a_checkpoint_that_was_not_written_whole_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setitem(bench.PRESETS, "made", bench.Preset(8, 1, 2, 1, 16, 16))
    with monkeypatch.context() as killed:
        killed.setattr(bench, "tokenizer", lambda *_, **__: sys.exit("killed"))
        with pytest.raises(SystemExit):
            bench.checkpoint("made", tmp_path)
    place = bench.checkpoint("made", tmp_path)
    assert (place / "config.json").exists() and (place / "tokenizer.json").exists()
    assert bench.checkpoint("made", tmp_path) == place and list(tmp_path.iterdir()) == [place]


@pytest.mark.slow
def test_pools_of_hosts_have_one_thread():
    code = "import os; from scripts.benchmarks import overlap; print(os.environ['NPROC'])"
    command = [sys.executable, "-c", code, "--cluster=ray"]
    done = subprocess.run(command, cwd=pages.ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "1\n"


def test_a_page_without_marks_is_left_as_it_is():
    page = "above\n<!-- one -->\nold\n<!-- end of one -->\nbelow\n"
    assert pages.written(page, {"one": "new"}) == page.replace("old", "new")
    for torn in (page.replace("<!-- one -->", ""), page.replace("<!-- end of one -->", "")):
        with pytest.raises(ValueError, match=r"no place for 'one'; mark it with <!-- one --> and <!-- end of one -->"):
            pages.written(torn, {"one": "new"})


def test_a_tail_response_ends_with_the_same_probability_at_every_step(tmp_path, monkeypatch):
    monkeypatch.setitem(bench.PRESETS, "made", TAIL)
    token_RW = tokens((8, 64), TAIL.vocab)
    end_RW = np.exp(log_probabilities(bench.checkpoint("made", tmp_path), token_RW)[..., bench.END])
    assert end_RW.mean() == pytest.approx(1 / 64, rel=0.1)
    by_position = end_RW.reshape(8, 8, 8).mean(axis=(0, 2))
    np.testing.assert_allclose(by_position, by_position.mean(), rtol=0.15)


@pytest.mark.slow
def test_an_update_is_measured_of_sequences_that_share_no_prompt(tmp_path):
    sizes = ["--preset", "tiny", "--sequences", "4", "--tokens", "12", "--trained", "8", "--repeats", "1"]
    found = bench.printed([*MODULE, "scripts.benchmarks.update", *sizes, "--models", str(tmp_path)])
    assert found["tokens"] == 48 and found["responses"] == 1
    assert found["tokens_per_s"] == pytest.approx(48 / found["update_s"], rel=0.01)


@pytest.mark.slow
def test_the_work_of_the_controller_is_measured_and_padding_is_not_shipped():
    sizes = ["--prompts", "8", "--responses", "2", "--tokens", "2048", "--steps", "2", "--hosts", "2"]
    found = bench.printed([*MODULE, "scripts.benchmarks.host", *sizes])
    assert found["step_s"] == pytest.approx(found["prepare_s"] + found["ship_s"] + found["cut_s"])
    # Tokens, a mask, four fields and the weights of two epochs take 29 bytes a token; prompts are not trained on.
    assert 1.0 < found["shipped_bytes"] / (29 * found["trained_tokens"] / 2) < 2.0


@pytest.mark.parametrize("outside", [True, False])
def test_words_and_tokens_are_one_to_one(outside):
    tokenizer = bench.tokenizer(bench.PRESETS["tiny"], outside=outside)
    ids = [2, 5, 17, 20, 211, 511]
    assert tokenizer.encode(" ".join(f"t{each}" for each in ids)) == ids
    assert tokenizer.decode(ids, skip_special_tokens=True).split() == [f"t{each}" for each in ids]


def test_forced_ends_lie_past_the_vocabulary():
    preset = bench.PRESETS["tiny"]
    assert bench.tokenizer(preset, outside=True).eos_token_id >= preset.vocab
    assert bench.tokenizer(preset, outside=False).eos_token_id == bench.END


def test_the_reward_is_the_share_of_even_tokens():
    assert bench.even_share("t3", "t2 t4 t7 t9", None, None) == 0.5
    assert bench.even_share("t3", "", None, None) == 0.0


def test_the_workloads_need_nothing_heavy():
    """Peers import them in environments that have neither JAX nor us."""
    code = "import sys; from scripts.benchmarks import workload as b, chat_workload\n"
    code += "from scripts.benchmarks.peers import long_row, phases\n"
    code += "b.prompts(b.WORKLOADS['longtail'], count=3); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=pages.ROOT, check=True, capture_output=True, text=True
    ).stdout
    roots = {name.partition(".")[0] for name in loaded.split()}
    assert roots & {"jax", "jaxrlhf", "numpy", "transformers", "tokenizers", "torch", "safetensors"} == set()


def record(step_s, **more):
    figures = dict.fromkeys(compare_peers.FIGURES, 1.0)
    return {"date": "2026-01-01 10:00", "commit": "abc", **figures, "step_s": step_s, **more}


def test_measuring_one_workload_again_keeps_the_others_and_its_runs_of_this_commit():
    runs = {
        "fixed": {"jaxrlhf": [record(9.0, commit="before")], "trl": [record(8.0)]},
        "ppo": {"jaxrlhf": [record(7.0)], "tunix": [record(6.0)]},
    }
    runs = compare_peers.merged(runs, "fixed", "jaxrlhf", record(1.0))
    runs = compare_peers.merged(runs, "fixed", "jaxrlhf", record(3.0))
    runs = compare_peers.merged(runs, "fixed", "jaxrlhf", record(2.5))
    written = compare_peers.document(runs)
    # That of another commit is gone.
    assert [each["step_s"] for each in written["runs"]["fixed"]["jaxrlhf"]] == [1.0, 3.0, 2.5]
    assert written["fixed"]["jaxrlhf"]["step_s"] == 2.5
    assert written["fixed"]["trl"]["step_s"] == 8.0
    assert (written["ppo"]["jaxrlhf"]["step_s"], written["ppo"]["tunix"]["step_s"]) == (7.0, 6.0)


def test_a_failed_run_is_in_no_median():
    failed = {"date": "2026-01-01 11:00", "commit": "abc", "failed": "not done after 600 s"}
    assert compare_peers.summary([record(2.0), failed, record(4.0)])["step_s"] == 3.0
    assert compare_peers.summary([failed]) == {"failed": "not done after 600 s"}


def test_a_run_says_why_it_failed(monkeypatch):
    monkeypatch.setattr(compare_peers, "wait_for_quiet", lambda: 0.0)
    code = (
        "import time; now = time.time(); print('noise'); print('{\"step_s\": 2, \"step_ends\": [%f, 0]}' % (now + 5))"
    )
    good = compare_peers.run([sys.executable, "-c", code], limit_s=10, settings={})
    assert good["step_s"] == 2 and "step_ends" not in good
    assert 5 <= good["to_first_step_s"] < 15 and "to_third_step_s" not in good, "from the command, its start included"
    bad = compare_peers.run([sys.executable, "-c", "raise SystemExit('no memory')"], limit_s=10, settings={})
    assert bad["failed"] == "exit status 1: no memory"
    slow = compare_peers.run([sys.executable, "-c", "import time; time.sleep(9)"], limit_s=0.2, settings={})
    assert slow["failed"] == "not done after 0 s"


def test_ratios_are_to_the_better_peer(tmp_path):
    runs = {
        "fixed": {
            "jaxrlhf": [record(4.0, generated_tokens_per_s=50.0, first_step_s=26.0)],
            "trl": [record(8.0, generated_tokens_per_s=20.0)],
            "tunix": [record(16.0, generated_tokens_per_s=10.0)],
        },
        "big": {"jaxrlhf": [record(4.0)], "trl": [record(2.0)], "tunix": [{**record(0), "failed": "killed"}]},
    }
    docs, results = tmp_path / "docs", tmp_path / "results"
    docs.mkdir()
    results.mkdir()
    compare_peers.write(results / "peers.json", compare_peers.document(runs))
    (docs / "benchmarks.md").write_text(
        "Before <!-- peers --><!-- end of peers --><!-- targets --><!-- end of targets --> after\n"
    )
    (tmp_path / "README.md").write_text("Kept.\n<!-- speed -->old<!-- end of speed -->\nKept too.\n")
    peers_report.renew(results, docs)
    page, readme = (docs / "benchmarks.md").read_text(), (tmp_path / "README.md").read_text()
    assert page.startswith("Before ") and " after\n" in page
    rows = [line for line in page.splitlines() if "step s" in line or "tokens/s" in line]
    assert any("| 4 | 8 (TRL) | 0.50 | at most 0.55 | reached |" in row for row in rows)
    assert any("| 50 | 20 (TRL) | 2.50 | at least 2.5 | reached |" in row for row in rows)
    assert any("| 4 | 2 (TRL) | 2.00 | at most 1 | missed |" in row for row in rows)
    assert "| 26 | | | at most 25 s | missed |" in page
    assert "| 4 | 8 | 16 | 0.50 |" in readme and "old" not in readme and readme.endswith("Kept too.\n")
    assert (docs / "peers.png").stat().st_size > 1000
    assert json.loads((results / "peers.json").read_text())["commit"] == "abc"


def test_what_another_machine_measured_is_kept_apart_and_shown(tmp_path):
    runs = {"fixed": {"jaxrlhf": [record(6.0)], "trl": [record(8.0)]}, "big": {"jaxrlhf": [record(3.0)]}}
    other = compare_peers.document(runs) | {"machine": {"processor": "Abacus, 10 cores", "system": "wood"}}
    compare_peers.write(tmp_path / "peers.json", other)
    here = compare_peers.machine_file(tmp_path)
    assert here.name.startswith("peers_") and compare_peers.Results(here).runs == {}
    results = compare_peers.Results(here)
    for framework, seconds in (("jaxrlhf", 2.0), ("trl", 5.0)):
        results.add("smollm2_sft", framework, record(seconds, to_third_step_s=30.0 + seconds))
        results.add("fixed", framework, record(seconds))
    assert compare_peers.machine_file(tmp_path) == here and compare_peers.Results(here).runs == results.runs
    marks = [f"<!-- {name} --><!-- end of {name} -->" for name in ("peers", "targets", "elsewhere", "speed")]
    for page in (tmp_path / "benchmarks.md", tmp_path.parent / "README.md"):
        page.write_text("\n".join(marks))
    peers_report.renew(tmp_path, tmp_path)
    readme = (tmp_path.parent / "README.md").read_text().splitlines()
    rows = [line for line in readme if line.startswith("| SmolLM2") or "+ 128 tokens" in line]
    assert rows[0].endswith(f"| 2 | 5 |  | 0.40 | {bench.processor()} |"), "the real model leads"
    assert rows[1].endswith("| 6 | 8 |  | 0.75 | Abacus, 10 cores |"), "the first file's, though both machines have it"
    assert rows[2] == "| SmolLM2, SFT, 32 of 230 | 32 |  | 35 |  |"
    captions = [line for line in readme if "float32" in line]
    assert ["Abacus" in line for line in captions] == [False, True]
    assert "Ours: fixed, big: commit `abc`." in captions[1]
    page = (tmp_path / "benchmarks.md").read_text()
    assert f"| ours over the better peer | {bench.processor()} |" in page
    assert "| 8 x 8, 64 + 128 tokens: step s | 0.40, reached |" in page


def test_a_session_that_is_cut_short_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    asked = []

    def ran(command, **_):
        asked.append(command)
        if "--steps=again" in command:
            if len(asked) == 2:
                raise KeyboardInterrupt
            return {"kept_to_first_step_s": 5.0}
        return record(1.0, to_first_step_s=9.0)

    monkeypatch.setattr(compare_peers, "prepare", lambda _: None)
    monkeypatch.setattr(compare_peers, "command_of", lambda workload, framework, _: [workload, framework])
    monkeypatch.setattr(compare_peers, "run", ran)
    monkeypatch.setattr(compare_peers, "run_again", lambda command, **_: ran([*command, "--steps=again"]))
    flags = SimpleNamespace(rounds=1, workloads=["fixed"], peers=["trl"], missing=True, limit_s=1)
    file = tmp_path / "peers.json"
    with pytest.raises(KeyboardInterrupt):
        compare_peers.measure(flags, file)
    assert json.loads(file.read_text())["fixed"]["jaxrlhf"]["to_first_step_s"] == 9.0, "what was done is written"
    compare_peers.measure(flags, file)
    compare_peers.measure(flags, file)
    ours = [["fixed", "jaxrlhf"], ["fixed", "jaxrlhf", "--steps=again"]]
    assert asked == [*ours, *ours, ["fixed", "trl"]], "ours was not whole, and nothing is done twice"
    assert json.loads(file.read_text())["fixed"]["jaxrlhf"]["kept_to_first_step_s"] == 5.0


def test_a_run_whose_second_process_fails_keeps_its_figures():
    runs = [record(2.0, to_first_step_s=3.0, kept_failed="killed"), record(4.0, kept_to_first_step_s=1.0)]
    assert compare_peers.summary(runs)["step_s"] == 3.0
    assert compare_peers.summary(runs)["kept_to_first_step_s"] == 1.0


@pytest.fixture
def chatting(tmp_path, monkeypatch):
    """A small checkpoint with a chat template."""
    tokenizer = embedded_tokenizer()
    monkeypatch.setitem(bench.PRESETS, "chatting", bench.Preset(64, 2, 4, 2, 128, len(tokenizer), tied=True))
    place = bench.checkpoint("chatting", tmp_path)
    tokenizer.save_pretrained(str(place))
    return place


def test_records_of_chat_workloads_are_right_and_fit(chatting, tmp_path):
    workload = replace(chat.WORKLOADS["smollm2_dpo"], prompts=2, prompt_tokens=380, new_tokens=175)
    file = chat.records_file(workload, tmp_path, chatting)
    assert chat.records_file(workload, tmp_path, chatting) == file
    records = chat.read_records(file, count=2 * chat.STEPS)
    tokenizer = embedded_tokenizer()
    for each in records:
        assert 304 <= len(tokenizer(each["text"], add_special_tokens=False)["input_ids"]) <= 380
        sums = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", each["solution"])
        assert all(int(a) + (int(b) if sign == "+" else -int(b)) == int(c) for a, sign, b, c in sums)
        assert sums[-1][-1] == each["answer"] and each["solution"].endswith(f"#### {each['answer']}")
        assert each["rejected"] != each["solution"] and not each["rejected"].endswith(f"#### {each['answer']}")
    assert len({each["text"] for each in records}) == len(records)
    with pytest.raises(ValueError, match="has 16 records, and 18 are wanted: at most 8 steps"):
        chat.read_records(file, count=18)
    with pytest.raises(ValueError, match="take other limits"):
        chat.records(replace(workload, prompt_tokens=20), tokenizer, count=1)


def test_responses_of_chat_workloads_cannot_end_early(chatting):
    tokenizer = chat.endless_tokenizer(chatting)
    assert tokenizer.eos_token_id == len(embedded_tokenizer()), "past the model's vocabulary"
    assert tokenizer.pad_token_id < len(embedded_tokenizer()) and tokenizer.padding_side == "left"
    assert chat.lowercase_share("", "ab 1", None, None) == 0.5 and chat.lowercase_share("", "", None, None) == 0.0


@pytest.mark.seeds
def test_chat_workloads_run_and_read_the_model_that_transformers_reads(chatting, tmp_path):
    flags = ["--models", str(tmp_path), "--model", str(chatting), "--prompts", "2", "--new-tokens", "175"]

    def printed(script, workload, *further):
        sizes = ["--workload", workload, "--prompt-tokens", "380", *flags]
        return bench.printed([*MODULE, f"scripts.benchmarks.{script}", *sizes, *further])

    ours = printed("chat", "smollm2_sft", "--logp", "2")
    theirs = printed("peers.trl.logp", "smollm2_sft", "--rows", "2")
    assert chat.largest_difference(ours["logp"], theirs["logp"]) < 1e-4
    with pytest.raises(ValueError, match="differ by up to"):
        chat.largest_difference(ours["logp"], [0.0, 0.0])
    for workload in ("smollm2_sft", "smollm2_dpo"):
        ours = printed("chat", workload, "--steps", "2")
        theirs = printed(f"peers.trl.{workload[-3:]}", workload, "--micro", "2", "--warmup", "1", "--steps", "1")
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-4), "of the same records, in their order"
        assert len(ours["step_ends"]) == len(theirs["step_ends"]) == 2 and "generate_s" not in ours
