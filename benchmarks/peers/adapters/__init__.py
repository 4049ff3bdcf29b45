"""Adapters: one module for each store, with a class `Adapter` of this form.

If a store lacks an operation, the class lacks the method, or its policies do not include the
strategy; `NONE` has the reason.

    POLICIES       sampling strategies of the store: "uniform", "priority", "order" (its own order)
    ONE_STORE      True: one store draws by all of them; False: one store is opened for each
    NONE           reasons for missing operations, by policy or method
    Adapter(folder, policy, capacity, shape)
                   open a store, with the data that an earlier one left in the folder
    put(groups)    return when the groups are acknowledged, in the sense of the store
    sample(policy, n)
                   draw n groups; the result is what the store returns
    parts(sample)  arrays [episodes, ...] of a sample: one dict for each object returned
    columns(sample)
                   one array [episodes, ...] for each field; optional, default: concatenated parts
    update_priorities(sample, values)
                   update the priorities of the groups of a sample
    checkpoint()   write a checkpoint of the store into the folder
    count()        number of groups in the store
    pids()         processes of the store other than this one and its children
    close()        close the store, and end processes that were started

Adapters may import only numpy, `benchmarks.peers.groups` and the store itself.
"""
