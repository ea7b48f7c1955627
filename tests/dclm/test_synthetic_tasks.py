"""Synthetic suite: examples have one answer, files round-trip, and the format of the authors is parsed."""

import json
import re
from random import Random

import pytest

from dclm.cli import main
from dclm.synthetic_tasks import TASKS, TaskText, make_suite, make_text, read_texts, write_texts
from dclm.synthetic_tasks.tasks import DOMAINS, SyntheticTask
from dctrain.errors import UserError

HAS = re.compile(r"(\w+) has the (\w+)\.")
LIST = re.compile(r"There are (\w+), (\w+), (\w+)\.")


def examples(task: SyntheticTask, count: int = 50):
    return [task.example(Random(f"{task.id} {number}")) for number in range(count)]


def test_suite_has_74_tasks_and_888_texts():
    texts = make_suite()
    assert len(TASKS) == len({task.id for task in TASKS}) == 74 and len(texts) == len(set(texts)) == 888
    assert {text.task_id for text in texts} == {task.id for task in TASKS}
    assert all([shots for *_, shots in text.answers()] == [2, 3, 4, 5, 6, 7] for text in texts)
    assert make_suite(1) != texts == make_suite(0)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_answer_follows_from_one_word_only(task):
    """The rule of the pattern finds the source word in the text. No other word of the example results in the answer."""
    made = DOMAINS[task.domain].transformations[task.transformation]
    for question, answer in examples(task):
        listed = LIST.search(question)
        if task.pattern == "different-in-set":
            (source,) = (word for word in listed.groups() if listed.groups().count(word) == 1)
        elif task.pattern == "the-other-class":
            name = re.search(r"nothing to do with (\w+)\?", question)[1]
            (source,) = (word for word in listed.groups() if DOMAINS[task.domain].classes[word] != name)
        elif task.pattern == "same-thing":
            source = re.search(r"Who owns the (\w+)\?", question)[1]
            assert question.count(source) == 2 and question.count(answer) == 1
            assert re.search(rf"{answer} has the {source}\.|The {source} belongs to {answer}\.", question)
            continue
        else:
            said, asked = question.split(" >. ")
            person = asked.split()[0]
            sentences = said.removeprefix("< ").rstrip(".").split(". ")
            wanted = task.pattern == "same-person"
            (sentence,) = (one for one in sentences if (person in one.split()) == wanted)
            (source,) = (word for word in sentence.split() if word in made)
            others = {made[word] for one in sentences if one != sentence for word in one.split() if word in made}
            assert answer not in others
        assert made[source] == answer


def test_transformations_map_single_words():
    for domain in DOMAINS.values():
        for transformation, made in domain.transformations.items():
            assert all(re.fullmatch(r"\w+", word) for pair in made.items() for word in pair), transformation
            assert transformation in domain.endings
    assert DOMAINS["year"].transformations["previous"]["2011"] == "2010"
    assert DOMAINS["month"].transformations["next"]["December"] == "January"


def test_text_in_authors_format_is_parsed():
    """As in the authors' file, answers in brackets follow two shots; the scored text includes its leading space."""
    text = "\n< A has tea. >. A has a kind of drink\n< B has a bus. >. B has a kind of vehicle\n"
    text += (
        "< C has jeans. >. C has a kind of [ clothing ]\n< D has a harp. >. D has a kind of [ musical instrument ]\n"
    )
    (first, answer, shots), (second, other, more) = TaskText("task0", text).answers()
    assert (answer, shots, other, more) == (" clothing", 2, " musical instrument", 3)
    assert first == text[: text.index(" [ clothing")] and first.endswith("C has a kind of")
    assert second.endswith("C has a kind of clothing\n< D has a harp. >. D has a kind of")


def test_suite_files_round_trip(tmp_path):
    texts = [make_text(task, Random(3)) for task in TASKS[::9]]
    write_texts(tmp_path / "suite.jsonl", texts)
    assert read_texts(tmp_path / "suite.jsonl") == texts
    other = json.dumps({"task_id": "a", "texts": "\u2028 is [ no end ]"}, ensure_ascii=False)
    with open(tmp_path / "suite.jsonl", "a", encoding="utf-8") as file:
        file.write(f"{other}\n\n")
    assert list(read_texts(tmp_path / "suite.jsonl")[-1].answers()) == [("\u2028 is", " no end", 0)]
    record = json.loads((tmp_path / "suite.jsonl").read_text().splitlines()[0])
    assert sorted(record) == ["task_id", "texts"] and record["texts"].startswith("\n< ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no texts of tasks"),
        ("{", "suite.jsonl:1 is not JSON"),
        ("[1]", "suite.jsonl:1 is not a text of a task"),
        ('{"task_id": "a"}', "expected strings 'task_id' and 'texts'"),
        ('{"task_id": "a", "texts": "no answer"}', "suite.jsonl:1 has no answer in brackets"),
        ('{"task_id": "a", "texts": "blank [ ]"}', "suite.jsonl:1 has no answer in brackets"),
        ('{"task_id": "a", "texts": "q [] and [ w ]"}', "suite.jsonl:1 has unmatched brackets"),
        ('{"task_id": "a", "texts": "q [[b]]"}', "suite.jsonl:1 has unmatched brackets"),
    ],
)
def test_invalid_suite_files_raise_user_error(tmp_path, content, said):
    (tmp_path / "suite.jsonl").write_text(content)
    with pytest.raises(UserError) as error:
        read_texts(tmp_path / "suite.jsonl")
    assert said in str(error.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_texts(tmp_path / "nowhere.jsonl")


def test_suite_command_does_not_overwrite_files(tmp_path, capsys):
    out = str(tmp_path / "folder" / "suite.jsonl")
    main(["suite", "--out", out])
    assert "888 texts of 74 tasks" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["suite", "--out", out])
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "named"), [(["--out="], "out=''"), (["--out=a.jsonl", "--seed=-1"], "seed=-1")])
def test_invalid_suite_options_are_rejected(tmp_path, monkeypatch, capsys, arguments, named):
    """A negative seed is rejected, as it would draw the same suite as its absolute value."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["suite", *arguments])
    assert named in capsys.readouterr().err and not any(tmp_path.iterdir())
