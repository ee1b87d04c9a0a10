"""The tests of mpsd. `harness` is shared by all; each folder is named after what it tests."""
