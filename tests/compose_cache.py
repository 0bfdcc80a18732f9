"""A cache for Hydra's composition of fairseq's configuration, which takes half a second of every command.

fairseq translates the flags of a command into Hydra's overrides, of which there are two kinds. A group, such as
``task=translation``, chooses one of the schemas from which Hydra composes the configuration. This takes time. A value,
such as ``optimization.lr=[0.1]``, sets an entry of the configuration. The tests run hundreds of commands with other
values, but with only a few sets of groups. So the configuration of each set of groups is cached.

Setting a few hundred values takes almost as long. Most commands with the same groups set the same entries, nearly all
of them to the same values. So a configuration with the values of the first such command is cached, too, and a later
command only sets the values that differ.

Before it composes, Hydra finds out which file has called it. It reads the sources of all functions on the stack for
this, which takes another tenth of a second. `find_calling_file` only looks at the function that has called Hydra.
"""

import functools
import io
import pickle
import sys
from typing import Any, NamedTuple

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict


class PickledConfig:
    """A configuration of which `copy` makes copies, by unpickling it. This is several times faster than copy.deepcopy.

    pickle stores a class by its name, and imports it by this name again. Some classes cannot be imported, such as the
    dataclasses of flags that the models make at run time. They are kept in a list, and the pickled configuration has
    their number in the list.
    """

    def __init__(self, config):
        self.classes = []  # those that cannot be imported
        stream = io.BytesIO()
        pickler = pickle.Pickler(stream)
        pickler.persistent_id = self.find_number  # pickle asks this function first for every object
        pickler.dump(config)
        self.pickled = stream.getvalue()

    def find_number(self, thing):
        """Returns the number of a class that cannot be imported, or None for every other object."""
        if not isinstance(thing, type) or can_be_imported(thing):
            return None
        if thing not in self.classes:
            self.classes.append(thing)
        return self.classes.index(thing)

    def copy(self):
        """Returns a new copy of the configuration."""
        unpickler = pickle.Unpickler(io.BytesIO(self.pickled))
        unpickler.persistent_load = self.classes.__getitem__  # It returns the class that has a number.
        return unpickler.load()


def can_be_imported(cls):
    """Returns whether the name of a class leads to this class."""
    module = sys.modules.get(cls.__module__)
    return getattr(module, cls.__qualname__, None) is cls


class CachedConfig(NamedTuple):
    """A configuration of Hydra, the schemas from which it was composed, and the values that were set in it."""

    schemas: list[Any]
    values: set[str]  # overrides
    config: PickledConfig


class CachedCompose:
    """A function that replaces Hydra's `compose`: composes each set of groups once, and sets the values in a copy.

    If an error occurs, Hydra's `compose` is called, so that a user's mistake leads to Hydra's own error.

    Args:
        compose: Hydra's function.
    """

    def __init__(self, compose):
        self.compose = compose
        self.cache = {}  # {(name of the configuration, *groups, *names of the entries that are set): CachedConfig}

    def __call__(self, config_name, overrides, strict):
        try:
            return self.compose_with_cache(config_name, overrides, strict)
        except Exception:
            return self.compose(config_name, overrides=overrides, strict=strict)

    def compose_with_cache(self, config_name, overrides, strict):
        """Returns a new configuration for the overrides; the arguments are those of Hydra's `compose`.

        Each command gets a copy of its own, which it may change.
        """
        groups = [override for override in overrides if is_group(override)]
        values = [override for override in overrides if not is_group(override)]
        names = [override.split("=")[0] for override in values]
        schemas = current_schemas(groups)

        # 1. the configuration of the groups, without values
        key_of_groups = (config_name, *groups)
        without_values = self.look_up(key_of_groups, schemas)
        if without_values is None:
            config = self.compose(config_name, overrides=groups, strict=strict)
            without_values = CachedConfig(schemas, values=set(), config=PickledConfig(config))
            self.cache[key_of_groups] = without_values

        # 2. the same with the values of the first command that sets these entries. The key has the names of the
        #    entries, so whatever this first command has set, the current command sets too, perhaps to another value.
        key = (config_name, *groups, *names)
        cached = self.look_up(key, schemas)
        if cached is None:
            config = without_values.config.copy()
            set_values(config, values)
            cached = CachedConfig(schemas, values=set(values), config=PickledConfig(config))
            self.cache[key] = cached

        # 3. the same with the values of this command. An override that the first command has given, too, such as
        #    "optimization.lr=[0.1]", is in the configuration already. Any other one replaces the first command's value
        #    of the same entry. So no other value of the first command is left: fairseq gives each entry one value.
        config = cached.config.copy()
        other_values = [override for override in values if override not in cached.values]
        set_values(config, other_values)
        return config

    def look_up(self, key, schemas):
        """Returns the CachedConfig of a key, or None if there is none or if it was composed from other schemas."""
        cached = self.cache.get(key)
        if cached is not None and are_same_objects(cached.schemas, schemas):
            return cached
        return None


def set_values(config, values):
    """Sets entries of a configuration, as Hydra's `compose` does for overrides such as ``optimization.lr=[0.1]``."""
    with open_dict(config):
        for override in values:
            key, value = parse_value(override)
            OmegaConf.update(config, key, value, merge=True)


def find_calling_file(stack_depth):
    """Returns the file and the module that call Hydra's `initialize`; it replaces a function of Hydra.

    Args:
        stack_depth: how many calls lie between the caller and this function.

    Returns:
        the name of the file, and the module of the calling function; None if the caller is no function of a module.
    """
    frame = sys._getframe(stack_depth)
    function = frame.f_globals.get(frame.f_code.co_name)
    return frame.f_code.co_filename, getattr(function, "__module__", None)


def is_group(override):
    """Returns whether an override chooses a schema (``task=translation``), instead of a value (``task.data=x``)."""
    key = override.split("=")[0]
    return "." not in key


def are_same_objects(first, second):
    """Returns whether two lists have the same objects in the same order."""
    return len(first) == len(second) and all(a is b for a, b in zip(first, second))


@functools.cache
def parse_value(override):
    """Returns the key and the value of an override: ``optimization.lr=[0.1]`` -> ("optimization.lr", [0.1])."""
    parsed = OverridesParser.create().parse_override(override)
    return parsed.key_or_group, parsed.value()


def current_schemas(groups):
    """Returns the schemas of these groups. A test may register another schema by the same name at any time."""
    repository = ConfigStore.instance().repo
    schemas = [repository.get("config.yaml")]
    for override in groups:
        group, name = override.split("=", 1)
        schemas.append(repository.get(group, {}).get(f"{name}.yaml"))
    return schemas
