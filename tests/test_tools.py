"""The tools to begin with: what they compute, and what they refuse."""
import math

import pytest
from rlblocks import Calculator, Documents, PythonTool, Sandbox, Search, tool_environment
from test_sandbox import confined


@pytest.mark.parametrize(("expression", "value"), [
    ("17*23", "391"), ("2**100", str(2**100)), ("98765432109876/2", "49382716054938"), ("1/3", "0.333333333333333"),
    ("7 % 4 - -2", "5"), (" (1.5 + 2) * 4", "14"), ("2**-1", "0.5"), ("1e300*1e300", "inf")])
def test_a_calculator_computes(expression, value): assert Calculator().calculate(expression) == value


@pytest.mark.parametrize("expression", ["__import__('os')", "9**9**9", "(-8)**.5", "x", "True", "1 if 2 else 3", "[1]",
                                        "1,2", "f'{1}'", "2**1001", "1+"*600 + "1"])
def test_a_calculator_refuses_what_is_no_arithmetic(expression):
    with pytest.raises((ValueError, SyntaxError)): Calculator().calculate(expression)


def test_a_search_scores_by_the_formula():
    "BM25, word by word; the best passages first, and none that shares no word."
    texts = ["a b b", "b c", "d", "a b c d e f g h"]
    made, mean = Documents(texts), (3 + 2 + 1 + 8)/4
    def score(word, text):
        n, f, words = sum(word in t.split() for t in texts), text.split().count(word), text.split()
        return math.log(1 + (4 - n + .5)/(n + .5))*f*2.2/(f + 1.2*(.25 + .75*len(words)/mean)) if f else 0.
    for text, counts in zip(texts, made.counts, strict=True):
        assert math.isclose(made.score(["a", "b", "z"], counts), score("a", text) + score("b", text), abs_tol=1e-12)
    ranked = sorted(texts, key=lambda t: score("a", t) + score("b", t), reverse=True)
    assert made.best("A, b!") == ranked[:3] and Search(made, n=1).search("d") == "d"
    assert Search(made).search("z") == "nothing found"


@confined
def test_python_says_what_it_printed_and_why_it_failed():
    tool = PythonTool(sandbox=Sandbox(seconds=20., workers=3), most=60)
    assert tool.at_once == 3
    assert tool.python("print(6*7)") == "42" and tool.python("x = 1") == "nothing was printed"
    assert tool.python("print(1)\n1/0") == "1\nerror: ZeroDivisionError: division by zero"
    assert tool.python("open('/etc/passwd')").startswith("error: FileNotFoundError")
    long = tool.python("print('ab'*500)\nraise ValueError('the end')")
    assert "more characters" in long and long.endswith("ValueError: the end") and len(long) < 100


def test_their_schemas_say_what_they_take():
    made = {name: tool_environment(tool)().tools[0]["function"] for name, tool in dict(
        calculate=Calculator, search=lambda: Search(Documents(["a"]))).items()}
    assert {k: x["name"] for k, x in made.items()} == dict(calculate="calculate", search="search")
    assert made["calculate"]["parameters"]["required"] == ["expression"]
