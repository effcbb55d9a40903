"""Callbacks for training frameworks: ranks are watched without a change in the user's module.

`lightning` and `transformers` translate a framework's hooks; `watching` performs the actions. No other module of this
package imports these modules, and only they import the frameworks."""
