"""The rules of the swarm: pure decisions, nothing else.

Nothing in this package knows asyncio, torch, hivemind, files or the time of day. `now` and `rng`
are arguments, timers are commands, and every decision comes with the sentence that explains it.
The daemon carries the commands out over a real network; the simulator does so on a virtual clock.

Theory of operation
-------------------
A swarm is a set of peers that hold one model. The unit of ownership is the *expert* (the FFN with
one index in every layer); everything else is the *shared parameters*. A peer trains the shared
parameters and the experts it owns, and holds the rest frozen.

* `records`: what a peer says of itself, signed and expiring. A claim in it is a lease on an expert.
* `roster`: whose records are fresh. A peer is alive, suspect, or gone; a peer that was itself
  asleep blames itself before it blames the others.
* `lease`: which claims hold. Claims with the highest term win; several at that term are co-owners.
* `placement`: which experts a peer should claim, as a function of what everybody can see, so that
  two peers with the same view agree on who acts.
* `plan`: which offered bundles a peer needs in a round, from whom, and what it does with them.
* `deadline`: how long to wait for the others, learned from how long they took.
* `round`: a peer's round as a transition table, event in, commands out.

Nobody coordinates a round. A peer that has made its local steps says so and trains on; when a
quorum of the live peers has, each closes the round by itself, and anyone's offer for a round
closes it for those who had not noticed. Older versions never overwrite newer ones: versions are
ordered by (round, term).
"""
