"""Print the project's dependencies, or those of its extras (gpu,ocr), as a requirements file."""

import sys
import tomllib
from pathlib import Path

with Path(__file__).with_name("pyproject.toml").open("rb") as file:
    project = tomllib.load(file)["project"]
names = [name.strip() for name in ",".join(sys.argv[1:]).split(",") if name.strip()]
extras = {name: lines for name, lines in project["optional-dependencies"].items() if name != "dev"}
if strange := [name for name in names if name not in extras]:
    sys.exit(f"EXTRAS: there is no extra {strange[0]!r}; there are: {', '.join(extras)}")
print(
    "\n".join(
        [line for name in names for line in extras[name]] if names else project["dependencies"]
    )
)
