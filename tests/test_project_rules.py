"""Rules of the code base that a reader cannot check by looking at one file."""

import ast
import importlib
import inspect
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"cudflash": ROOT / "cudflash", "cudflash.loader": ROOT / "loader",
            "cudflash.raw_kernels": ROOT / "raw_kernels"}  # fmt: skip

# Rooms from low to high; a room may import those of lower rank and itself. The first matching
# prefix counts. The package itself (`from cudflash import __version__`) is open to everybody.
ROOMS = (
    ("cudflash.errors", 0),
    ("cudflash.loader", 1),
    ("cudflash.raw_kernels", 2),
    ("cudflash.ops.store", 2),
    ("cudflash.ops.cpu", 3),
    ("cudflash.ops.cuda", 3),
    ("cudflash.sampling", 3),
    ("cudflash.model", 4),
    ("cudflash.spec", 5),
    ("cudflash.tui", 7),
    ("cudflash.cli", 8),
    ("cudflash.__main__", 9),
    ("cudflash", 6),  # engine, session, events, plan and the rest
)
# what a room must not import although its rank would allow it
FORBIDDEN = {
    "cudflash.loader": ("numba", "cupy", "llvmlite"),
    "cudflash.sampling": ("numba", "cupy", "llvmlite", "cudflash.loader", "cudflash.ops"),
    "cudflash.model": ("numba", "cupy", "cudflash.ops", "cudflash.sampling"),
    "cudflash.ops.cpu": ("cupy", "cudflash.ops.cuda", "cudflash.raw_kernels"),
    "cudflash.ops.cuda": ("numba", "cudflash.ops.cpu"),
    "cudflash.spec": ("rich", "click", "cudflash.ops"),
    "tests.reference": ("cudflash.model", "cudflash.ops", "cudflash.engine", "numba"),
}

MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 80
LONGER_FILES = {}  # path -> (limit, reason)
LONGER_FUNCTIONS = {}  # "path:function" -> (limit, reason)


def tracked(*patterns):
    """Paths git tracks or would track (so a new file is checked before it is added)."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:  # an unpacked source archive has no git
        found = [p.relative_to(ROOT) for pattern in patterns for p in ROOT.rglob(pattern)]
    else:
        found = [Path(line) for line in done.stdout.splitlines()]
    return sorted(path for path in set(found) if (ROOT / path).is_file())


def module_name(path):
    """Import name of a file of the package."""
    for name, folder in PACKAGES.items():
        if name != "cudflash" and folder in (ROOT / path).parents:
            parts = (ROOT / path).relative_to(folder).with_suffix("").parts
            return ".".join([name, *parts]).removesuffix(".__init__")
    return ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")


def package_files():
    """Python files that are installed."""
    return [p for p in tracked("*.py") if p.parts[0] in ("cudflash", "loader", "raw_kernels")]


def parsed(path):
    """Syntax tree of a tracked file."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def imports(path):
    """Every module a file imports anywhere, `from a import b` as both a and a.b."""
    package = module_name(path).split(".")
    if Path(path).name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def inside(module, room):
    """Whether a module is a room or lies in it."""
    return module == room or module.startswith(room + ".")


def rank(module):
    """(room, rank) of one of our modules."""
    return next((room, value) for room, value in ROOMS if inside(module, room))


def test_import_direction_of_every_file_points_down():
    """A loader that knows models, a model that knows its backend, engine code that knows the CLI."""
    wrong = []
    for path in package_files():
        name = module_name(path)
        if name == "cudflash":
            continue  # the public names are looked up by string, on first use
        room, own = rank(name)
        for target, line in imports(path):
            if not inside(target, "cudflash") or target in ("cudflash", "cudflash.__version__"):
                continue
            other, theirs = rank(target)
            if theirs > own or (theirs == own and other != room):
                wrong.append(f"{path}:{line}: {room} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_import_bans_of_every_room_hold():
    """A room that reaches for a library or a neighbour it must not know."""
    wrong = []
    for path in [*package_files(), *tracked("tests/reference/*.py")]:
        name = module_name(path)
        for room, banned in FORBIDDEN.items():
            if inside(name, room):
                wrong += [
                    f"{path}:{line}: {room} imports {target}"
                    for target, line in imports(path)
                    if any(inside(target, ban) for ban in banned)
                ]
    assert not wrong, "\n".join(wrong)


def test_import_rule_sees_a_violation():
    """A rank table so loose that nothing can break it."""
    assert rank("cudflash.loader.gguf") == ("cudflash.loader", 1)
    assert rank("cudflash.engine") == ("cudflash", 6)
    assert rank("cudflash.cli.chat")[1] > rank("cudflash.session")[1] > rank("cudflash.model.x")[1]
    assert ("cudflash.errors.UsageError", 0) not in imports(Path("cudflash/cli/common.py"))
    assert "cudflash.errors.UsageError" in dict(imports(Path("cudflash/cli/common.py")))


def test_cpu_and_cuda_op_sets_have_the_same_functions():
    """An op that exists on one device only, or takes its arguments in another order there."""
    cpu = importlib.import_module("cudflash.ops.cpu")
    cuda = importlib.import_module("cudflash.ops.cuda").CudaOps
    for name in cpu.__all__:
        assert hasattr(cuda, name), f"cudflash.ops.cuda has no {name}"
        theirs, ours = getattr(cpu, name), getattr(cuda, name)
        if not callable(theirs):
            assert theirs == ours, name
            continue
        names = [list(inspect.signature(f).parameters) for f in (theirs, ours)]
        assert names[0] == [n for n in names[1] if n != "self"], name


def test_package_code_uses_no_assert():
    """Validation by assert: it vanishes under `python -O`."""
    found = [
        f"{path}:{node.lineno}"
        for path in package_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assert)
    ]
    assert not found, found


# raised for a mistake of the programmer, which no input of a user can cause
PROGRAMMER_ERRORS = ("loader/ggml_types.py", "cudflash/ops/cpu/formats.py", "cudflash/spec/")


def test_exceptions_of_package_code_are_ours():
    """A user error raised as ValueError: the command line would call it an internal error."""
    banned = {"ValueError", "TypeError", "Exception", "OSError", "AssertionError"}
    found = [
        f"{path}:{node.lineno}: raises {node.exc.func.id}"
        for path in package_files()
        if not str(path).startswith(PROGRAMMER_ERRORS)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
        and node.exc.func.id in banned
    ]
    assert not found, "\n".join(found)


def test_no_bare_todo_anywhere():
    """A TODO nobody can find again; write TODO(#issue)."""
    bare = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))")
    found = [
        f"{path}:{number}"
        for path in tracked("*.py", "*.md", "*.toml", "*.cu", "*.cuh", "Makefile", ".ci/run")
        if path != Path("tests/test_project_rules.py")
        for number, line in enumerate(read_lines(path), 1)
        if bare.search(line)
    ]
    assert not found, found


def read_lines(path):
    """Lines of a text file."""
    return (ROOT / path).read_text(encoding="utf-8").splitlines()


def test_files_stay_short():
    """The file nobody reads to its end."""
    found = []
    for path in tracked("*.py", "*.cu", "*.cuh"):
        limit = LONGER_FILES.get(str(path), (MAX_FILE_LINES, ""))[0]
        lines = len(read_lines(path))
        if lines > limit and path != Path("loader/unicode_table.py"):
            found.append(f"{path}: {lines} lines, at most {limit}")
    assert not found, "\n".join(found)


def test_functions_stay_short():
    """The function nobody can hold in mind; one defined inside another is counted by itself."""
    found = []
    for path in tracked("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                limit = LONGER_FUNCTIONS.get(f"{path}:{node.name}", (MAX_FUNCTION_LINES, ""))[0]
                lines = own_lines(node)
                if lines > limit:
                    found.append(f"{path}:{node.lineno}: {node.name} has {lines} lines")
    assert not found, "\n".join(found)


def own_lines(function):
    """Lines of a function without its docstring and without what is defined inside it."""
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        lines -= first.end_lineno - first.lineno + 1
    for node in function.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            lines -= node.end_lineno - node.lineno + 1
    return lines


def test_modules_and_public_functions_have_docstrings():
    """A module or a public function whose purpose has to be guessed."""
    found = []
    for path in package_files():
        tree = parsed(path)
        if tree.body and not ast.get_docstring(tree):
            found.append(f"{path}: module")
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
            # a kernel body is described where its launcher is
            kernel = public and any("kernel" in ast.unparse(d) for d in node.decorator_list)
            if public and not kernel and not ast.get_docstring(node):
                found.append(f"{path}:{node.lineno}: {node.name}")
    assert not found, "\n".join(found)


def test_tracked_text_names_no_machine():
    """Paths and hosts of the machine something was written on."""
    # put together here, so that this file does not contain them itself
    words = ["/" + "work/", "/" + "root/", "/opt/" + "pypi", "pythonhosted" + ".org",
             "pypi" + ".org/simple", "find" + "-links"]  # fmt: skip
    found = []
    for path in tracked():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path}: {word}" for word in words if word in text]
    assert not found, found


def test_no_code_touches_the_import_path():
    """Tests that pass because they patch sys.path, while the installed package is broken."""
    banned = "sys" + ".path."
    found = [
        f"{path}:{number}"
        for path in tracked("*.py")
        for number, line in enumerate(read_lines(path), 1)
        if banned in line
    ]
    assert not found, found


def test_package_list_names_every_package_folder():
    """A new folder that works in the checkout and is missing from the wheel."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML by itself")

    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(config["tool"]["setuptools"]["packages"])
    found = {module_name(path) for path in package_files() if path.name == "__init__.py"}
    assert listed == found
    folders = {path.parent for path in package_files()}
    assert all((ROOT / folder / "__init__.py").exists() for folder in folders)
