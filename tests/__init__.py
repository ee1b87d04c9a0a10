"""The tests of mpsd. `harness` is what they share; each folder is named after what it tests."""
