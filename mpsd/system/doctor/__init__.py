"""The observations of `mpsctl doctor`, and the fixes of `--fix`; `core/doctor` judges them."""
