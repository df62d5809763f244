"""Each row of the table in ``docs/explanation/pickling.md`` is true."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.scripts import values

STEP = """
def step(m):
    before = m.weight.item()
    opt.zero_grad()
    m(torch.ones(1, 1)).sum().backward()
    opt.step()
    return round(before - m.weight.item(), 3)
model = torch.nn.Linear(1, 1, bias=False)
opt = torch.optim.SGD(model.parameters(), lr=1.0)
"""
# By the beginning of a row: definitions, lines, what they print.
ROWS = {
    "`from math import sqrt`": (
        "from math import sqrt\ndef f(): return sqrt(4), torch.__name__",
        ["call(f)", "call(sqrt, 9)"],
        "(2.0, 'torch') 3.0",
    ),
    "a function or class of a module next": (
        "import beside_of_test",
        ["call(beside_of_test.f)", "! beside_of_test.K = 2", "call(beside_of_test.f)"],
        "1 1",
    ),
    "a module that was loaded from a file": (
        "import types\nplug = types.ModuleType('plug')\nexec('K = 1\\ndef f(): return K', vars(plug))",
        ["call(plug.f)", "call(lambda: plug.f())", "! plug.K = 2", "call(plug.f)"],
        "1 1 2",
    ),
    "a function of your script": ("def f(): return 1\ndef g(): return f", ["call(g) is f", "call(f)"], "True 1"),
    "a class of your script, and its instances": (
        "class A: pass\nheld = None\ndef look(): return type(held) is A\n"
        "def keep(a):\n global held\n held = a\n return a",
        ["type(call(keep, A())) is A", "call(look)", "call(lambda a: isinstance(a, A), A())"],
        "True True True",
    ),
    "`@functools.cache`": (
        "@functools.cache\ndef load():\n print('load')\n return 1",
        ["call(load)", "call(load)", "call(lambda: load())"],
        "load 1 1 1",
    ),
    "a lambda, or a function": (
        "def make():\n n = []\n return lambda: n.append(1) or len(n)\nf = make()",
        ["call(f)", "call(f)"],
        "1 1",
    ),
    '`config["lr"] = 0.1` before': (
        "config = {'lr': 1}\ndef f(): return config['lr']",
        ["call(f)", "! config['lr'] = 0.1", "call(f)"],
        "1 0.1",
    ),
    "`Config.lr = 0.1`": (
        "class Config: lr = 1\ndef f(): return Config.lr",
        ["call(f)", "! Config.lr = 0.1", "call(f)"],
        "1 0.1",
    ),
    '`Config.options["lr"] = 0.1`': (
        "class Config: options = {'lr': 1}\ndef f(): return Config.options['lr']",
        ["call(f)", "! Config.options['lr'] = 2", "call(f)"],
        "1 2",
    ),
    '`Config.options["sgd"]["lr"] = 0.1`': (
        "class Config: options = {'sgd': {'lr': 1}}\ndef f(): return Config.options['sgd']['lr']",
        *(
            [
                "call(f)",
                "! Config.options['sgd']['lr'] = 2",
                "call(f)",
                "! Config.options = {'sgd': {'lr': 3}}",
                "call(f)",
            ],
        ),
        "1 1 3",
    ),
    "a function or class that you define anew": (
        "def f(): return 1\ndef g(): return f()",
        ["call(g)", "! exec('def f(): return 2', globals())", "call(g)"],
        "1 2",
    ),
    "`seen.append(x)` in a task": (
        "seen = []\ndef f():\n seen.append(1)\n return len(seen)",
        ["call(f)", "call(f)", "seen"],
        "1 1 []",
    ),
    "`global model; model = load()`": (
        "model = None\ndef load():\n global model\n model = 7\ndef f(): return model",
        ["call(load)", "call(f)", "model"],
        "None 7 None",
    ),
    "the same, and then `model = None`": (
        "model = None\ndef load():\n global model\n model = 7\ndef f(): return model",
        ["call(load)", "! model = None", "call(f)", "! model = 8", "call(f)", "! model = None", "call(f)"],
        "None 7 8 None",
    ),
    "a model and its optimizer": (
        STEP + "def both(): return step(model)",
        ["call(both)", "call(step, model)"],
        "1.0 1.0",
    ),
    "a model from `put`, and": (STEP, ["call(step, ex.put(model))"], "0.0"),
    "a function that holds data": (
        "model, known = torch.zeros(1), []\ndef f(m=model, k=known):\n k.append(1)\n return m.item(), len(k)",
        ["call(f)", "! _ = model.add_(1)", "call(f)", "! _ = known.append(0)", "call(f)"],
        "(0.0, 1) (1.0, 1) (1.0, 2)",
    ),
    "a global `rng = random.Random(0)`": (
        "import random\nrng = random.Random(0)\ndef f(): return rng.random()",
        ["call(f) == call(f) == call(f)"],
        "True",
    ),
    "`from settings import CONFIG`": (
        "from beside_of_test import CONFIG\ndef f(): return CONFIG['lr']",
        ["call(f)", "! CONFIG['lr'] = 0.1", "call(f)"],
        "1 0.1",
    ),
    "`from random import random`": (
        "import random as library\nfrom random import random\nfrom os import environ\n"
        "def f():\n environ['ROW_OF_TEST'] = '1'\n return random.__self__ is library._inst, os.environ['ROW_OF_TEST']",
        ["call(f)", "call(random) == call(random)", "'ROW_OF_TEST' in os.environ"],
        "(True, '1') False False",
    ),
    "`MISSING = object()`": (
        "MISSING = object()\ndef f(x=MISSING): return x is MISSING",
        ["call(f)", "call(f, MISSING)", "call(lambda: MISSING) is MISSING"],
        "True True True",
    ),
    "locks, events, queues": (
        "import multiprocessing\nfrom nn_parallel import TransferError",
        [
            *("! try: call(len, multiprocessing.get_context('fork').Lock())\nexcept TransferError: print('refused')",),
            *("! try: call(len, multiprocessing.Pipe()[0])\nexcept TransferError: print('refused')",),
            "! with multiprocessing.get_context('fork').Manager() as m: q = m.Queue(); call(q.put, 3); print(q.get())",
        ],
        "refused refused 3",
    ),
    "environment, working directory": (
        "def f(): return os.environ.get('ROW_OF_TEST')",
        ["call(f)", "! os.environ['ROW_OF_TEST'] = '1'", "call(f)", "! del os.environ['ROW_OF_TEST']", "call(f)"],
        "None 1 None",
    ),
    "variables of the environment": (
        "import sys\ndef f(): return os.environ.get('ROW_OF_TEST'), '/row/of/test' in sys.path",
        [
            *("! os.environ['ROW_OF_TEST'] = '1'", "! sys.path.append('/row/of/test')", "call(f)"),
            *("! sys.path.remove('/row/of/test')", "! del os.environ['ROW_OF_TEST']", "call(f)"),
        ],
        "('1', True) (None, False)",
    ),
    "umask, user and groups": (
        "def f():\n with open('/proc/self/status') as file: return [line for line in file if line.startswith('Umask')]",
        ["call(f) == f()", "! before = os.umask(0o077)", "call(f) == f()", "! _ = os.umask(before)"],
        "True False",
    ),
    "threads of torch": (
        "from nn_parallel._engine.devices import cpu_count\ndef f(): return torch.get_num_threads() == cpu_count()",
        ["call(f)"],
        "True",
    ),
    "random numbers": (
        "from nn_parallel import seed_everything\ndef f(): return seed_everything(1) or torch.rand(1).item()\n"
        "def g(): return torch.rand(1).item()",
        ["! state = torch.get_rng_state()", "call(f) == call(f)", "call(g) == g()", "! torch.set_rng_state(state)"],
        "True False",
    ),
    "`torch.set_default_dtype`": (
        "def f(): return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), "
        "torch.get_float32_matmul_precision()",
        ["! torch.set_float32_matmul_precision('high')", "call(f)", "! torch.set_float32_matmul_precision('highest')"],
        "(torch.float32, False, 'highest')",
    ),
    "`warnings.filterwarnings`": (
        "import logging\ndef f(): return logging.root.level, logging.root.handlers",
        ["! level = logging.root.level", "! logging.root.setLevel(10)", "call(f)", "! logging.root.setLevel(level)"],
        "(30, [])",
    ),
    "`torch.set_grad_enabled`": (
        "def f(): return torch.is_grad_enabled()",
        ["! with torch.no_grad(): print(f(), call(f))"],
        "False True",
    ),
    "settings of a library": (
        "import decimal\ndef f(): return decimal.getcontext().prec",
        ["! decimal.getcontext().prec = 5", "call(f)", "! decimal.getcontext().prec = 28"],
        "28",
    ),
}
PAGE = (ROOT / "docs" / "explanation" / "pickling.md").read_text()
TABLE = [line.removeprefix("| ") for line in PAGE.splitlines() if line.startswith("| ") and "in a worker" not in line]


def test_each_row_has_its_test() -> None:
    """In the order of the page."""
    begins = [next((begin for begin in ROWS if row.startswith(begin)), row) for row in TABLE]
    assert begins == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.filterwarnings("ignore:The call has parameters")
def test_the_row_is_true(row: str, main: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines print what the row says."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "beside_of_test.py").write_text("K, CONFIG = 1, {'lr': 1}\ndef f(): return K\n")
    definitions, lines, printed = ROWS[row]
    try:
        assert values(main, definitions, lines) == printed
    finally:
        sys.modules.pop("beside_of_test", None)


def test_the_page_has_the_rule_in_three_sentences() -> None:
    """Numbered, and before the table."""
    assert re.findall(r"^\d\. \*\*(.+?)\*\*", PAGE.partition("| in your script")[0], re.M) == [
        "What an import finds is imported.",
        "Definitions are sent once.",
        "Data comes with each call.",
    ]
