"""How does a wrapped call run?  The call itself, its monitor, its stores. No user imports these modules."""
