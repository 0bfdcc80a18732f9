"""The type of an inspection's results, for modules that read results without importing torch."""

from typing import Any

Results = dict[str, Any]  # what was measured, under the keys of the JSON file: numbers, texts, lists and dictionaries
