"""A cache for Hydra's composition of fairseq's configuration, which takes half a second of every command.

The overrides of a command are of two kinds: groups (``task=translation``), which say which schemas the configuration
consists of, and values (``optimization.lr=[0.1]``). The tests run hundreds of commands with a few sets of groups.
"""

import copy
import functools

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict


class CachedCompose:
    """Stands in for Hydra's `compose`: composes a set of groups once, and sets the values in a copy.

    Whatever this cannot do, Hydra does, so that a user's mistake has Hydra's own error.
    """

    def __init__(self, compose):
        self.compose = compose
        self.cache = {}  # {(name of the configuration, groups): (schemas, configuration)}

    def __call__(self, config_name, overrides, strict):
        try:
            return self.compose_with_cache(config_name, overrides, strict)
        except Exception:
            return self.compose(config_name, overrides=overrides, strict=strict)

    def compose_with_cache(self, config_name, overrides, strict):
        groups = [override for override in overrides if is_group(override)]
        values = [override for override in overrides if not is_group(override)]
        config = copy.deepcopy(self.compose_groups(config_name, groups, strict))
        with open_dict(config):
            for override in values:
                key, value = parse_value(override)
                OmegaConf.update(config, key, value, merge=True)
        return config

    def compose_groups(self, config_name, groups, strict):
        """Returns the configuration of groups without other overrides; not to be modified."""
        key = (config_name, *groups)
        schemas = current_schemas(groups)
        if key in self.cache:
            cached_schemas, config = self.cache[key]
            if all(cached is current for cached, current in zip(cached_schemas, schemas)):
                return config
        config = self.compose(config_name, overrides=groups, strict=strict)
        self.cache[key] = schemas, config
        return config


def is_group(override):
    """Whether an override chooses a schema (``task=translation``) rather than sets a value (``task.data=x``)."""
    key = override.split("=")[0]
    return "." not in key


@functools.cache
def parse_value(override):
    """Returns the key and the value of an override, by Hydra's grammar."""
    parsed = OverridesParser.create().parse_override(override)
    return parsed.key_or_group, parsed.value()


def current_schemas(groups):
    """Returns the schemas that these groups have now. A test may have registered other ones by the same names."""
    repository = ConfigStore.instance().repo
    schemas = [repository.get("config.yaml")]
    for override in groups:
        group, name = override.split("=", 1)
        schemas.append(repository.get(group, {}).get(f"{name}.yaml"))
    return schemas
