"""Files of runs and evaluations that were damaged or edited."""

import json

import pytest

from dctrain.cli.safe_yaml import check_yaml_file
from dctrain.errors import UserError
from dctrain.evaluation.answer_cache import AnswerCache
from dctrain.evaluation.ranks import EvaluationRanks
from dctrain.evaluation.results import read_results
from dctrain.loggers import _read_ids, _rows_until
from dctrain.utils.environment import add_environment, read_environments

MEASURE = {
    **{"name": "a", "metric": "loss", "value": 1.0, "stderr": None, "higher_is_better": False},
    **{"count": 3, "unit": "tokens", "is_detail": False},
}
CONTENT = {
    **{"format": "dcmha-evaluation-1", "model": "m", "checkpoint": "c", "parameters": 1},
    **{"identity": {"weights_crc32": 1, "dtype": "float32"}, "environment": {"commit": None, "torch": "2"}},
    "results": {"texts a": {"settings": {}, "note": None, "measures": [MEASURE]}},
}


def test_valid_results_are_read(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(CONTENT))
    assert read_results(path).measures[0].value == 1.0


@pytest.mark.parametrize(
    "change",
    [
        *({"results": []}, {"results": None}, {"results": {"a": None}}, {"results": {"a": {"settings": {}}}}),
        *({"results": {"a": {"settings": {}, "measures": value}}} for value in (None, [1], [{"name": 5}])),
        *({"results": {"a": {"settings": {}, "measures": [MEASURE | {"value": value}]}}} for value in ("x", None)),
        {"results": {"a": {"settings": {}, "measures": [MEASURE | {"more": 1}]}}},
        {"results": {"a": {"settings": {}, "measures": [MEASURE | {"stderr": "x"}]}}},
        {"results": {"a": {"settings": {}, "measures": [MEASURE | {"count": None}]}}},
        *({"identity": []}, {"identity": None}, {"environment": {}}, {"model": None}),
    ],
)
def test_malformed_results_are_rejected(tmp_path, change):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(CONTENT | change))
    with pytest.raises(UserError, match="m.json is not a result of `evaluate`"):
        read_results(path)


@pytest.mark.parametrize("line", ['{"a": 1}', "5", '["a", 1, 2]', '[["a"], [1]]', '["a", null]', "\udcff"])
def test_answer_cache_is_read_up_to_damaged_line(tmp_path, line):
    lines = ['{"model": 1}', '["first", [1, 2]]', line, '["last", "text"]']
    (tmp_path / "m.partial-0.jsonl").write_text("\n".join(lines) + "\n", errors="surrogateescape")
    journal = AnswerCache(tmp_path, "m", {"model": 1}, EvaluationRanks(0, 1, 0))
    journal.close(is_done=False)
    assert journal.known == {"first": [1, 2]}


@pytest.mark.parametrize("content", ["5", "{", "[5]", '{"a": 1}'])
def test_damaged_environment_record_is_replaced(tmp_path, content):
    path = tmp_path / "environment.json"
    path.write_text(content)
    add_environment(path, {"device": "cpu"})
    assert read_environments(path) == [{"device": "cpu"}]


@pytest.mark.parametrize("content", ["{", "[]", '{"WandbLogger": 5}'])
def test_damaged_logger_ids_raise_error(tmp_path, content):
    path = tmp_path / "loggers.json"
    path.write_text(content)
    with pytest.raises(UserError, match="loggers.json is damaged"):
        _read_ids(path)


@pytest.mark.parametrize(
    "rows", ["loss\n1\n", "loss,step\n1,x\n", "loss,step\n1,1.5\n", "loss,step\n1,1,7\n", "a,step\n\udcff,1\n"]
)
def test_damaged_metrics_file_raises_error_and_is_preserved(tmp_path, rows):
    path = tmp_path / "metrics.csv"
    path.write_text(rows, errors="surrogateescape")
    before = path.read_bytes()
    with pytest.raises(UserError, match="metrics.csv is damaged"):
        _rows_until(path, 5, False)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {lr: 0.5}\nmodel: {weight_decay: 0.2}\n", "line 1: 'model' is given twice"),
        ("model:\n  lr: 1\n  lr: 2\n", "line 2: 'lr' is given twice"),
        ("model: 5\n", "model must be a mapping of settings"),
        ("data: []\n", "data must be a mapping of settings"),
    ],
)
def test_duplicate_keys_and_non_mapping_sections_raise_error(tmp_path, text, message):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        check_yaml_file(path)
    path.write_text("base: &base {lr: 1}\nmodel:\n  <<: *base\n  decay: null\ndata: null\n")
    check_yaml_file(path)
