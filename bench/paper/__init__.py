"""The Llumnix paper's evaluation (OSDI'24) again, in the simulator; and our policy beside it."""
