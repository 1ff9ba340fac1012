"""The cluster's queue for one model: admission, late binding, liveness, leader election."""
