"""Callbacks for training frameworks: ranks are watched without a change in the user's module.

`lightning` and `transformers` translate a framework's hooks, `watching` does what they stand for. Nothing
else in this package imports these modules, and they alone import the frameworks."""
