"""One example of every message, with every field set, so that every field shows in its bytes.

Some fields exclude each other in use (`messages` and `prompt`); here they are all filled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.services import process

from antiphon.wire import (
    claim,
    command,
    generate,
    heartbeat,
    kv_events,
    media,
    sampling,
    seal,
    submit,
    text,
    tokenize,
    tokens,
)
from antiphon.wire.base import Attempt, FinishReason, Message, ProcessState, Role, Term, Usage
from antiphon.wire.codec import pack_ids, pack_numbers
from antiphon.wire.errors import ErrorReply
from antiphon.wire.ids import ClientKey, ModelName, RequestId, TenantId
from antiphon.wire.token_outputs import TokenOutputs, TokenOutputsChunk, pack_floats

if TYPE_CHECKING:
    from collections.abc import Mapping

MODEL = ModelName("antiphon-small")
REQUEST = RequestId("0123456789abcdef0123456789abcdef")
OTHER_REQUEST = RequestId("fedcba9876543210fedcba9876543210")
KEY = ClientKey("my-request-1")
DEADLINE = 1_767_225_600_000
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
GATEWAY = process("gateway-0", "aaaa000000000001")
SCHEDULER = process("scheduler-0", "bbbb000000000002")
WORKER = process("worker-0", "cccc000000000003")
DETOKENIZER = process("detokenizer-0", "dddd000000000004")
TERM = Term(number=7, scheduler=SCHEDULER)
FIRST = Attempt(term=TERM, n=1)
SECOND = Attempt(term=TERM, n=2)
STOP = sampling.StopStrings(
    strings=("\n\n", "END"),
    patterns=("[0-9]{3}",),
    include=True,
    skip_special_tokens=False,
    token_texts=True,
    thinking=sampling.ThinkingMarks(
        begin="<think>", end="</think>", cuts=("<tool_call>",), inside=True, again=True
    ),
)
RESUME = submit.ResumeWindow(
    window_ms=30_000, fingerprint=bytes(range(32)), created_unix_s=1_767_225_000
)
PROCESSORS = (
    sampling.DisallowTokens(token_ids=(5, 6)),
    sampling.AllowTokens(token_ids=(7, 70_000)),
    sampling.AllowRange(first=10, last=20),
    sampling.ThinkingBudget(tokens_max=128, begin_id=30, closing_ids=(31, 32)),
    sampling.DisallowFirst(token_ids=(7, 50_257)),
    sampling.TimestampRules(first_id=50_364, end_id=50_257, initial_max=50),
)
GRAMMAR = sampling.Grammar(kind=sampling.GrammarKind.REGEX, text="[a-z]+", begins_after=(31, 32))
DETAIL_PARAMS = sampling.TokenOutputParams(
    ids=True, logprobs=True, top=2, named_ids=(4, 5), hidden=True, prompt_start=3
)
DETAILS = TokenOutputs(
    count=2,
    token_ids=pack_ids((7, 70_000)),
    logprobs=pack_floats((-0.5, -1.25)),
    top_ids=pack_ids((7, 8, 9, 70_000)),
    top_logprobs=pack_floats((-0.5, -2.0, -0.75, -1.25)),
    named_logprobs=pack_floats((-3.0, -4.0, -5.0, -6.0)),
    hidden=pack_floats((0.5, 1.5, -2.5, 3.5)),
    pooled=pack_floats((0.25, -0.75)),
    times=pack_floats((3.0, 4.0)),
)
PIECE = TokenOutputsChunk(
    offset=-2,
    details=DETAILS,
    texts={7: "Grü", 70_000: "\N{REPLACEMENT CHARACTER}"},
    written={70_000: b"\xc3"},
)
SAMPLED: Mapping[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "frequency_penalty": 0.25,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.125,
    "processors": PROCESSORS,
    "grammar": GRAMMAR,
    "seed": -42,
    "ignore_eos": True,
    "details": DETAIL_PARAMS,
}
"""Fields that requests of clients and of the cluster have alike."""
SAMPLING = sampling.SamplingParams(
    **SAMPLED,
    max_new_tokens=64,
    min_new_tokens=4,
    logit_bias=sampling.LogitBias(
        token_ids=pack_ids((9, 70_000)), values=pack_floats((-1.5, 100.0))
    ),
    stop_token_ids=(2, 3),
    pool=sampling.PoolParams(dimensions=256, second_from=12),
    alignment=sampling.AlignmentParams(
        tokens=3, source_tokens=1500, heads=((2, 3), (3, 0)), filter_width=9
    ),
)
ERROR = ErrorReply(
    code="overloaded",
    message="the queue is full",
    retry_after_s=1.5,
    param="model",
    details={"waiting": "1024"},
)
USAGE = Usage(prompt_tokens=11, completion_tokens=5, cached_tokens=3, reasoning_tokens=2)
CLAIM = claim.Claim(
    address="127.0.0.1:40123",
    token="2f1c9d",  # an example
    size_bytes=1_048_576,
    digest=bytes(range(32)),
    expires_unix_ms=DEADLINE,
    part_bytes=524_288,
    part_digests=bytes([3]) * 64,
)
DIGESTS = (bytes([1]) * 32, bytes([2]) * 32)
LIMITS = claim.PixelLimits(least=1000, most=9000, low=True, fps=1.5, frames=6)
VIDEO = claim.VideoHeader(frames=48, fps=24.0, chosen=True)
AUDIO = claim.AudioWindow(format="mp3", start_s=30.0, seconds=47.5)
HEADER = media.MediumHeader(
    digest=DIGESTS[0],
    width=640,
    height=480,
    limits=LIMITS,
    rows=4,
    patches=(4, 4),
    video=VIDEO,
    audio=AUDIO,
)
FORM = media.EmbeddingForm(rows=4, width=8, dtype="float16", patches=(4, 4), size=(56, 57))
SPAN = media.MediumSpan(
    start=1, tokens=2, key=DIGESTS[1], placeholders=1, columns=4, times=2, step=1.5
)
MEDIUM = media.Medium(
    span=SPAN,
    width=640,
    height=480,
    claim=CLAIM,
    limits=LIMITS,
    embedded=True,
    video=VIDEO,
    audio=AUDIO,
)
CHAT = (
    tokenize.ChatMessage(
        role="tool",
        content="Grüße, 世界 👋",
        name="Ada",
        reasoning_content="hm",
        tool_calls=(
            tokenize.MessageToolCall(id="call_1", name="look", arguments='{"at": "Rome"}'),
        ),
        tool_call_id="call_1",
        without_content=True,
        parts=(tokenize.MessagePart(text="Grüße", medium=3),),
    ),
)

SUBMIT = submit.SubmitRequest(
    request_id=REQUEST,
    owner=GATEWAY,
    tenant=TenantId("acme"),
    model=MODEL,
    digest=DIGESTS[0],
    prompt_ids=pack_ids((1, 2, 3)),
    block_digests=b"".join(DIGESTS),
    choices=2,
    sampling=SAMPLING,
    stop=STOP,
    priority=5,
    cache_salt=DIGESTS[0],
    waited_ms=1500,
    deadline_unix_ms=DEADLINE,
    attempt_floor=FIRST,
    traceparent=TRACE,
    sealed=submit.OwnerSeal(
        sealed_to=SECOND,
        attempts=(FIRST,),
        choices=(
            command.ChoiceOutput(
                choice=1,
                output_ids=pack_ids((9, 8)),
                details=DETAILS,
                finish_reason=FinishReason.STOP,
                matched_stop=2,
            ),
        ),
    ),
    resume=RESUME,
    output_bytes=4096,
    media=(MEDIUM,),
    prompt=claim.PromptClaim(claim=CLAIM),
)
HELD = heartbeat.RunningRequest(
    request_id=REQUEST,
    attempt=FIRST,
    tokens=40,
    detokenizer=DETOKENIZER.instance,
    detokenizer_incarnation=DETOKENIZER.incarnation,
    ended=True,
    waiting=True,
    returned=True,
)
EVERY: tuple[Message, ...] = (
    generate.GenerateRequest(
        key=KEY,
        model=MODEL,
        messages=CHAT,
        prompt="Once upon",
        prompt_ids=(1, 2, 70_000),
        media=(
            media.MediumInput(
                data=b"GIF89a",
                url="https://a.example/b.png",
                detail="low",
                claim=CLAIM,
                embedding=FORM,
                video=True,
                audio=True,
            ),
        ),
        min_pixels=1000,
        max_pixels=9000,
        fps=1.5,
        max_frames=6,
        max_tokens=64,
        **SAMPLED,
        min_tokens=4,
        logit_bias={9: -1.5, 70_000: 100.0},
        n=2,
        stop=("\n\n",),
        stop_regex=("[0-9]{3}",),
        stop_token_ids=(2,),
        no_stop_trim=True,
        skip_special_tokens=False,
        continue_final_message=True,
        tools='[{"type": "function"}]',
        chat_template_kwargs='{"thinking": false}',
        priority=-3,
        cache_salt="room 5",
        token_texts=True,
        stream=False,
        timeout_s=30.5,
        traceparent=TRACE,
        api_key="sk-example",
        resume_s=30.0,
        resume_from=generate.ResumePosition(
            request_id=REQUEST,
            places=(generate.TextCursor(choice=1, text_offset=12, token_offset=-2),),
        ),
    ),
    generate.GenerateAccepted(
        key=KEY, request_id=REQUEST, gateway=GATEWAY.instance, details_from=-8
    ),
    generate.GenerateText(
        request_id=REQUEST, choice=1, text_offset=12, text="né 👋", details=PIECE
    ),
    generate.GenerateEnd(
        request_id=REQUEST,
        choices=(
            generate.ChoiceEnd(
                choice=1,
                finish_reason=FinishReason.STOP,
                text_bytes=17,
                text="Hello there, you.",
                details=PIECE,
                details_end=17,
                matched_stop="END",
            ),
        ),
        usage=USAGE,
        error=ERROR,
    ),
    generate.GenerateResume(
        request_id=REQUEST, places=(generate.TextCursor(choice=1, text_offset=12, token_offset=-2),)
    ),
    generate.GenerateCancel(request_id=REQUEST),
    generate.GenerateDone(request_id=REQUEST),
    tokenize.EncodeRequest(
        request_id=REQUEST,
        model=MODEL,
        tenant=TenantId("acme"),
        messages=CHAT,
        prompt="Once upon",
        pair="a time",
        suffix="The end",
        continue_final_message=True,
        template=tokenize.TemplateParams(
            generation_prompt=False, tools='[{"type": "function"}]', options='{"thinking": false}'
        ),
        special_tokens=False,
        truncate=True,
        media=(HEADER,),
        transcription=tokenize.TranscriptionPrompt(
            language="en", translate=True, timestamps=True, output=pack_ids((1, 2))
        ),
        cache_salt=DIGESTS[0],
        left_ms=1500,
        deadline_unix_ms=DEADLINE,
        traceparent=TRACE,
    ),
    tokenize.CancelEncode(request_id=REQUEST),
    tokenize.DecodeRequest(
        request_id=REQUEST,
        model=MODEL,
        token_ids=(pack_ids((1, 2)), pack_ids((70_000,))),
        skip_special_tokens=False,
        left_ms=1500,
        deadline_unix_ms=DEADLINE,
        traceparent=TRACE,
    ),
    submit.AbortRequests(
        prefix="my-",
        tenant=TenantId("acme"),
        exact=True,
        sender=GATEWAY,
        not_after_unix_ms=DEADLINE,
    ),
    tokenize.DecodeReply(request_id=REQUEST, texts=("Once", " upon")),
    generate.EmbedRequest(
        model=MODEL,
        texts=("One", "Two"),
        pairs=("1", "2"),
        prompt_ids=((1, 70_000), (2,)),
        dimensions=256,
        cache_salt="room 5",
        priority=-1,
        timeout_s=2.5,
        traceparent=TRACE,
        api_key="k",
    ),
    generate.EmbedReply(
        model=MODEL,
        vectors=(pack_floats((0.5, -1.5)), pack_floats((1.0, 0.0))),
        labels=("bad", "good"),
        usage=USAGE,
    ),
    tokenize.EncodeReply(
        request_id=REQUEST,
        token_ids=pack_ids((1, 2, 70_000)),
        block_digests=b"".join(DIGESTS),
        text_end="<|assistant|><think>",
        vocabulary_size=4096,
        context_tokens=2048,
        hidden_size=896,
        defaults=tokenize.SamplingDefaults(
            temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.05
        ),
        architecture="LlamaForCausalLM",
        token_characters=24,
        untruncated_tokens=4000,
        model_type="llama",
        tool_parser="hermes",
        reasoning_parser="qwen3",
        reranks=True,
        second_from=2,
        media=(SPAN,),
        sees=True,
        sees_videos=True,
        takes_audio=True,
        transcription=tokenize.TranscriptionCard(
            window_s=30.0,
            languages=("en", "de"),
            language_ids=(50_259, 50_261),
            end_id=50_257,
            first_timestamp_id=50_364,
            timestamp_s=0.02,
            suppressed=(1, 2),
            first_suppressed=(220, 50_257),
            first_timestamp_max=50,
            no_speech_id=50_362,
            alignment_heads=((2, 3), (3, 0)),
            filter_width=9,
        ),
        media_width=64,
        pooling=tokenize.PoolingCard(
            scores=True,
            width=2,
            matryoshka=True,
            cuts=(128, 256),
            labels=("bad", "good"),
            several=True,
            plain_score=True,
            images=True,
        ),
    ),
    claim.EncodeImage(
        request_id=REQUEST,
        model=MODEL,
        image=b"\x89PNG",
        claim=CLAIM,
        width=640,
        height=480,
        limits=LIMITS,
        video=VIDEO,
        audio=AUDIO,
        left_ms=1500,
        deadline_unix_ms=DEADLINE,
        traceparent=TRACE,
        tenant=TenantId("acme"),
    ),
    claim.ImageEmbedding(
        request_id=REQUEST,
        content_digest=DIGESTS[0],
        tokens=196,
        hidden=768,
        dtype="float32",
        claim=CLAIM,
        cached=True,
        tower="cd" * 32,
    ),
    SUBMIT,
    submit.SubmitAccepted(request_id=REQUEST, term=TERM, position=3),
    submit.CancelRequest(request_id=REQUEST, owner=GATEWAY, deadline_unix_ms=DEADLINE),
    submit.CancelAccepted(request_id=REQUEST),
    submit.AdoptRequest(
        request_id=REQUEST, tenant=TenantId("acme"), owner=GATEWAY, fingerprint=DIGESTS[0]
    ),
    submit.RequestAdopted(
        submit=SUBMIT,
        term=TERM,
        attempt=FIRST,
        changed=True,
    ),
    submit.OpenList(
        model=MODEL,
        owner=GATEWAY,
        version=9,
        whole=True,
        opened=(submit.OpenRequest(request_id=REQUEST, deadline_unix_ms=DEADLINE, attempt=FIRST),),
        closed=(OTHER_REQUEST,),
        not_after_unix_ms=DEADLINE,
        parts=2,
    ),
    submit.OpenListState(
        model=MODEL,
        owner=GATEWAY,
        version=10,
        count=20_000,
        digest=bytes(range(8)),
        not_after_unix_ms=DEADLINE,
    ),
    submit.FetchOpenList(gateway=GATEWAY),
    submit.NoticeBatch(
        leader=TERM,
        gateway=GATEWAY,
        requests=(submit.LostRequest(request_id=REQUEST, attempt=FIRST, error=ERROR),),
        lacking=(OTHER_REQUEST,),
        seals=(seal.SealRequest(request_id=REQUEST, attempt=SECOND),),
        not_after_unix_ms=DEADLINE,
    ),
    command.CommandBatch(
        leader=TERM,
        worker=WORKER,
        seq=4,
        commands=(
            command.Admit(
                request_id=REQUEST,
                owner=GATEWAY,
                attempt=SECOND,
                continues=FIRST,
                lineage=(FIRST,),
                owner_sealed=True,
                detokenizer=DETOKENIZER.instance,
                detokenizer_incarnation=DETOKENIZER.incarnation,
                prompt_ids=pack_ids((1, 2, 3)),
                choices=(
                    command.ChoiceOutput(
                        choice=1,
                        output_ids=pack_ids((9, 8)),
                        details=DETAILS,
                        finish_reason=FinishReason.STOP,
                        matched_stop=2,
                    ),
                ),
                sampling=SAMPLING,
                stop=STOP,
                priority=5,
                cache_salt=DIGESTS[0],
                waited_ms=1500,
                steps=True,
                columns=True,
                tenant=TenantId("acme"),
                deadline_unix_ms=DEADLINE,
                traceparent=TRACE,
                resume_ms=30_000,
                media=(MEDIUM,),
                prompt=claim.PromptClaim(claim=CLAIM),
            ),
            command.Rebind(
                request_id=REQUEST,
                attempt=SECOND,
                continues=FIRST,
                detokenizer=DETOKENIZER.instance,
                detokenizer_incarnation=DETOKENIZER.incarnation,
                columns=True,
                owner=GATEWAY,
                deadline_unix_ms=DEADLINE,
                media=(MEDIUM,),
            ),
            command.Abort(request_id=OTHER_REQUEST, attempt=FIRST, error=ERROR),
        ),
        not_after_unix_ms=DEADLINE,
    ),
    command.StopChoice(
        request_id=REQUEST, attempt=FIRST, detokenizer=DETOKENIZER, choice=1, offset=6
    ),
    command.ResendTokens(
        worker=WORKER,
        detokenizer=DETOKENIZER,
        places=(command.TokenCursor(request_id=REQUEST, choice=1, offset=6),),
    ),
    command.DrainWorker(migrate=True),
    command.FlushCache(unless_busy=True),
    command.PauseWorker(mode=command.PauseMode.IN_PLACE),
    command.ContinueWorker(),
    command.SetWeightVersion(version="step-7", abort_all=False),
    command.DumpPlans(),
    command.AddCorpus(
        corpus_id="code",
        upload=REQUEST,
        part=1,
        last=False,
        documents=(pack_ids((1, 2, 3)), pack_ids((70_000,))),
    ),
    command.RemoveCorpus(corpus_id="code"),
    command.ListCorpora(),
    command.ListKernels(),
    command.ControlDone(
        pages_freed=128,
        requests=2,
        file="/var/dumps/plans.antiphon",
        corpora={"code": 4},
        kernels=(
            command.KernelChoice(
                op="norm.rmsnorm", backend="torch", refused={"cpu": "no compiler"}, draft=True
            ),
        ),
    ),
    kv_events.KvEvents(
        worker=WORKER,
        seq=9,
        events=(
            kv_events.BlocksStored(parent=DIGESTS[0], digests=DIGESTS[1]),
            kv_events.BlocksRemoved(digests=b"".join(DIGESTS)),
            kv_events.BlocksCleared(),
        ),
    ),
    kv_events.ReplayKv(after=6, snapshot=9, part=1),
    kv_events.KvReplayed(
        worker=WORKER, seq=9, events=(kv_events.BlocksCleared(),), snapshot=True, part=2
    ),
    tokens.TokenStep(worker=WORKER, seq=13, step=346, token_ids=pack_ids((8,))),
    tokens.TokenBatch(
        worker=WORKER,
        seq=12,
        step=345,
        rows=(
            tokens.TokenRow(
                request_id=REQUEST,
                choice=1,
                attempt=SECOND,
                offset=2,
                token_ids=pack_ids((7, 70_000)),
                details=DETAILS,
                stream=tokens.TokenStream(
                    owner=GATEWAY,
                    prompt_tokens=11,
                    details_from=-8,
                    cached_tokens=3,
                    choices=2,
                    continues=FIRST,
                    lineage=(FIRST,),
                    detokenizer_incarnation=DETOKENIZER.incarnation,
                    owner_sealed=True,
                    continued=(4, 0),
                    stop=STOP,
                    deadline_unix_ms=DEADLINE,
                    traceparent=TRACE,
                    resume_ms=30_000,
                ),
                weights="step-7",
                retractions=1,
                finish_reason=FinishReason.ERROR,
                matched_stop=2,
                error=ERROR,
                stream_number=41,
            ),
        ),
        columns=tokens.TokenColumns(
            streams=pack_numbers((42, 2**40)),
            offsets=pack_ids((0, 8)),
            token_ids=pack_ids((7, 70_000)),
            logprobs=pack_floats((-0.5,)),
        ),
    ),
    text.TextBatch(
        detokenizer=DETOKENIZER,
        gateway=GATEWAY,
        seq=12,
        rows=(
            text.TextRow(
                request_id=REQUEST,
                choice=1,
                attempt=SECOND,
                continues=FIRST,
                lineage=(FIRST,),
                text_offset=12,
                text="né 👋",
                details=PIECE,
                finish_reason=FinishReason.STOP,
                matched_stop=2,
                usage=USAGE,
                tokens=7,
                reasoning_tokens=3,
                origins=(
                    text.Origin(start=3, worker=WORKER.instance, weights="step-7", retractions=1),
                ),
                error=ERROR,
                ids=pack_ids((9, 8)),
            ),
        ),
    ),
    text.ResumeText(
        detokenizer=DETOKENIZER,
        gateway=GATEWAY,
        places=(
            text.ChoiceCursor(
                request_id=REQUEST, choice=1, text_offset=12, token_offset=-2, tokens=5
            ),
        ),
    ),
    text.TextResumed(rows=2),
    seal.SealAttempts(
        leader=TERM, requests=(seal.SealRequest(request_id=REQUEST, attempt=SECOND),)
    ),
    seal.AttemptsSealed(
        detokenizer=DETOKENIZER,
        requests=(
            seal.SealedRequest(
                request_id=REQUEST,
                attempt=SECOND,
                lineage=(FIRST,),
                sealed=False,
                failed=True,
                size_bytes=70,
                choices=(
                    command.ChoiceOutput(
                        choice=1,
                        output_ids=pack_ids((9, 8)),
                        details=DETAILS,
                        finish_reason=FinishReason.STOP,
                        matched_stop=2,
                    ),
                ),
            ),
        ),
    ),
    claim.PutPages(
        pages=(claim.PageOffer(digest=DIGESTS[1], parent=DIGESTS[0], claim=CLAIM),),
        left_ms=1500,
        deadline_unix_ms=DEADLINE,
    ),
    claim.PagesStored(stored=DIGESTS),
    claim.LookupPages(chain=DIGESTS),
    claim.PagesFound(pages=2),
    claim.GetPages(request_id=REQUEST, chain=DIGESTS, lease_s=30.0),
    claim.PagesLeased(lease="lease-1", claims=(CLAIM,)),
    claim.ReleaseLease(lease="lease-1", corrupt=True),
    claim.LeaseReleased(),
    heartbeat.Heartbeat(
        role=Role.WORKER,
        process=WORKER,
        state=ProcessState.READY,
        model=MODEL,
        wire_version=2,
        config_digest="ab" * 32,
        health_port=8081,
        load=3,
        worker=heartbeat.WorkerLoad(
            pages_free=100,
            pages_total=512,
            page_tokens=16,
            running=(HELD,),
            waiting=2,
            running_max=64,
            step=345,
            step_age_s=0.25,
            context_tokens=2048,
            term=TERM,
            commands_seq=4,
            paused=True,
            weight_version="step-7",
            bits="isa:avx2",
            pages_promised=30,
            pages_returning=12,
            kv_seq=77,
            hands_back=True,
            listed=heartbeat.RunningListState(version=12, count=3, digest=bytes(range(8)), live=2),
            figures=heartbeat.WorkerStats(
                device="cpu",
                weight_bytes=3_000_000_000,
                cache_bytes=400_000_000,
                output_tokens_s=812.5,
                prompt_tokens=5000,
                cached_tokens=2500,
                waiting_tokens=300,
                pages_cached=40,
                grammars=1,
                retracted=2,
                verify_rows=90,
                drafts_proposed=270,
                drafts_accepted=180,
            ),
            refused=heartbeat.RefusedCommands(
                leader=TERM, seq=5, reason=heartbeat.RefusalReason.LATE
            ),
        ),
        leads=TERM,
        streams=(heartbeat.StreamSeq(receiver=DETOKENIZER.instance, seq=12),),
        reads=("TokenStep",),
        sent_unix_ms=DEADLINE - 2500,
        not_after_unix_ms=DEADLINE,
        unechoed_ms=1500,
        tower="cd" * 32,
    ),
    heartbeat.RunningList(
        worker=WORKER,
        version=12,
        whole=True,
        opened=(HELD,),
        closed=(REQUEST,),
        parts=2,
    ),
    heartbeat.FetchRunningList(worker=WORKER),
    heartbeat.Discover(asker=GATEWAY),
    heartbeat.ProcessExited(process=WORKER),
    heartbeat.ClaimName(process=GATEWAY, held=True),
    heartbeat.NameTaken(process=GATEWAY),
    heartbeat.MetricsReport(
        role=Role.WORKER,
        process=WORKER,
        model=MODEL,
        metrics_port=30100,
        families=(
            heartbeat.MetricFamily(
                name="step_seconds",
                bounds=(0.01, 0.1),
                series=(heartbeat.MetricSeries(labels=("a",), value=1.5, counts=(3.0, 4.0, 5.0)),),
            ),
        ),
        number=7,
        part=1,
        parts=2,
    ),
    ERROR,
)
EXAMPLES: dict[type[Message], Message] = {type(example): example for example in EVERY}
