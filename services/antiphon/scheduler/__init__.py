"""The cluster's queue of one model: admission, late binding, supervision, leadership."""
