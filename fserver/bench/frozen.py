"""The fork server imports this last: collections in its children pass over what it has imported."""

import gc

gc.freeze()
