import torch
from tests.replay.families import build, PROMISED
from tests.replay import rollout as r
from collector.replay import replay_routes
import torch,transformers; print(torch.__version__,transformers.__version__)
def close(a,b): return max(float((a[n]-b[n]).abs().max()/(b[n].abs().max()+1e-9)) for n in b)
for f in PROMISED:
    m=build(f,0).cuda(); ids=r.sentences(1,(7,4))
    bs=[r.padded(r.sentences(s,(7,4)),"right",7) for s in (1,2)]
    for b in bs: b.inputs={k:v.cuda() if hasattr(v,'cuda') else v for k,v in b.inputs.items()}
    R=[r.random_routes(m,b,s) for s,b in enumerate(bs)]
    def rep(b,R):
        with replay_routes(m,R,**b.layout): return r.run(m,b)[1]
    want=[rep(*x) for x in zip(bs,R)]; nat=r.run(m,bs[0])[1]
    for re in (False,True):
        m.gradient_checkpointing_enable({"use_reentrant":re})
        m.zero_grad(); L=[]; reps=[]
        for b,q in zip(bs,R):
            with replay_routes(m,q,**b.layout) as p: L.append(r.loss_of(m(**b.inputs).logits,b))
            reps.append(p)
        later=r.loss_of(m(**bs[0].inputs).logits,bs[0])
        res=[]
        for l,w in zip(L[::-1]+[later],want[::-1]+[nat]):
            m.zero_grad(); l.backward(); res.append(close(r.gradients(m),w))
        print(f,re,["%.1e"%x for x in res],"native differs %.2f"%close(nat,want[0]),[str(p) for p in reps][0],flush=True)
        del L,l,later; m.gradient_checkpointing_disable()
        print(sum(len(x._forward_hooks) for x in m.modules()))
