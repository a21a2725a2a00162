"""An arm of one's own: `MODULE:CLASS` or `FILE.py:CLASS` of a restart policy or a method, as an arm's text."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import MutableMapping
from pathlib import Path

from twophase.base.errors import UsageError
from twophase.base.files import file_sha256
from twophase.policies.base import RestartPolicy
from twophase.policies.text import POLICIES_VARIABLE
from twophase.recipes.arms import needs_no_rule
from twophase.recipes.bench import NESTEROV
from twophase.shelf.base import Method
from twophase.shelf.text import SHELF_VARIABLE

_OWN = re.compile(r"(?P<module>.+\.py|[\w.]+(?=:[A-Z])):(?P<name>[A-Za-z_]\w*)(?P<rest>.*)")


def read_arm(arm: str, environment: MutableMapping[str, str]) -> tuple[str, str]:
    """Return an arm's text and the start of the SHA-256 of its code, empty where the code is of this package.

    The text of a class is its registered name and what stands behind the class. A restart policy that needs a rule is
    that of Nesterov, whose search begins where the bench's own begins.

    Args:
        arm: a text of `twophase.recipes.arms`, or a user's class.
        environment: variables of the worker processes, for the class's module and its folder on their path.

    Raises:
        UsageError: a module that cannot be imported, or a class that is no registered policy or method.
    """
    match = _OWN.fullmatch(arm)
    if match is None:
        if arm.endswith(".py"):
            raise UsageError(f"{arm}: give the name of a class behind it, {arm}:CLASS")
        return arm, ""
    module, name, rest = match["module"], match["name"], match["rest"]
    file = Path(module).absolute() if module.endswith(".py") else None
    if file is not None:
        if not file.is_file():
            raise UsageError(f"{arm}: there is no file {module}; give the path of the class's file")
        module, folder = file.stem, str(file.parent)
        sys.path.insert(0, folder)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, environment.get("PYTHONPATH", "")]))
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # of the module's own code
        raise UsageError(
            f"{arm}: {module} cannot be imported ({type(error).__name__}: {error}); fix it"
            f"{'' if file else ', or give its path as FILE.py:CLASS'}"
        ) from error
    if file is not None and not file.samefile(imported.__file__ or ""):
        raise UsageError(f"{arm}: Python has another module {module}, {imported.__file__}; rename the file")
    member = getattr(imported, name, None)
    if not isinstance(member, type) or not issubclass(member, (RestartPolicy, Method)):
        raise UsageError(f"{arm}: {module} has no class {name} that is a RestartPolicy or a Method; name one")
    is_policy = issubclass(member, RestartPolicy)
    if not vars(member).get("name"):
        decorator = "twophase.restart.register" if is_policy else "twophase.shelf.base.register"
        raise UsageError(f'{arm}: {name} has no text form; decorate it with @{decorator}("name")')
    variable = POLICIES_VARIABLE if is_policy else SHELF_VARIABLE
    environment[variable] = ",".join(dict.fromkeys(filter(None, [*environment.get(variable, "").split(","), module])))
    text = f"{member.name}{rest}"
    if is_policy and not needs_no_rule(text.partition("+")[0].replace("~", "")):
        text = f"{NESTEROV}@{text}"
    return text, file_sha256(Path(inspect.getfile(member)))[:12]
