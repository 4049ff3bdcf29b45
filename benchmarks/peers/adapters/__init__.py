"""One module for each store, with a class `Adapter` of this form.

A store that cannot do a thing has no such method, or does not name the policy; `NONE` says why.

    POLICIES       of "uniform", "priority" and "order" (its own order), those it can draw by
    ONE_STORE      True: one store draws by all of them; else one is made for each policy
    NONE           why it lacks what it lacks: by policy or method
    Adapter(folder, policy, capacity)
                   opens a store, which finds what an earlier one left in the folder
    put(groups)    returns when they are acknowledged, in whatever sense the store has
    sample(policy, n)
                   n groups, as the store hands them out
    pieces(sample) their arrays [episodes, ...]: one dict for each thing handed out
    columns(sample)
                   one array [episodes, ...] for each field; pieces are concatenated without it
    update_priorities(sample, values)
                   of the groups of a sample
    checkpoint()   as the store itself does it, into the folder
    count()        how many groups it has
    pids()         what runs for it beside this process and its children
    close()        let go, and end what was started

Only numpy, `benchmarks.peers.groups` and the store itself may be imported.
"""
