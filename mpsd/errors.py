"""The errors that a program gets from mpsd: those of the catalogue, under the name that programs import."""

from mpsd.core.errors import *  # noqa: F403 - each class of the catalogue, and nothing else
