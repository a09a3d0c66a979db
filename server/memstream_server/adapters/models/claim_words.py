"""Words that make a statement a claim about a state, by language: data of claims.py.

Each list holds lowercase words as written; claims.py compares them as written and, for topics, by their stems. Written
for this project. A memory whose language has no list here uses all of them together, as `auto` does; Chinese is
recognised by its script.

negations   words that negate a statement
changes     words that announce that something is different from before
presents    words that say since when something is true: alone they end no earlier state
states      verbs and copulas of a lasting state; an event of the past has none of them
dates       weekdays, months and times of the day
numbers     cardinal numbers; an ordinal ("second") is none
others      people whose facts are not the speaker's
addressed   words for the listener: a statement about the listener is no claim of the speaker
own         the speaker: pronouns, and verbs in the first person where the language drops the pronoun
relatives   words that begin a clause about something in the clause before it
vague       pronouns for a thing: a clause with such a subject only does not say what it is about
additions   words that say that something is true besides: it replaces nothing
unsettled   words of a condition, a guess, a wish or hearsay: the speaker does not state it as a fact
topics      words that name the same fact in different ways, by topic
fillers     words without content
compounds   beginnings of compound words of a topic; the whole compound stays a word with content
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memstream_server.core.suspicions import FAVOURITE, NAMED, RESIDENCE, WORK


@dataclass(frozen=True, slots=True)
class ClaimWords:
    """The lists of one language."""

    negations: frozenset[str]
    changes: frozenset[str]
    presents: frozenset[str]
    states: frozenset[str]
    dates: frozenset[str]
    numbers: Mapping[str, str]
    others: frozenset[str]
    addressed: frozenset[str]
    own: frozenset[str]
    unsettled: frozenset[str]
    relatives: frozenset[str]
    additions: frozenset[str]
    vague: frozenset[str]
    topics: Mapping[str, frozenset[str]]
    fillers: frozenset[str]
    compounds: Mapping[str, str] = field(default_factory=dict)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _numbers(text: str) -> dict[str, str]:
    """Number words from two; "one" is an article or a pronoun in most languages."""
    return {word: str(value) for value, words in enumerate(text.split(","), 2) for word in words.split()}


ENGLISH = ClaimWords(
    negations=_words(
        "not no never don't doesn't didn't isn't aren't wasn't can't cannot couldn't won't haven't hasn't nobody "
        "none neither without"
    ),
    changes=_words(
        "anymore longer moved relocated instead changed switched became quit resigned retired left hired joined "
        "stopped sold replaced renamed postponed rescheduled cancelled canceled delayed increased raised rose "
        "dropped decreased reduced lowered promoted fired transferred upgraded divorced married swapped shifted "
        "converted fell grew climbed jumped doubled cut expired downgraded graduated converted"
    ),
    presents=_words("now nowadays currently"),
    states=_words(
        "is are am i'm it's we're they're was's have has i've we've had's live lives living work works working cost "
        "costs own owns like likes love loves hate hates prefer prefers want wants need needs know knows use uses "
        "drive drives drink drinks eat eats play plays smoke smokes speak speaks study studies rent rents pay pays "
        "called named starts start begins begin ends leaves leave arrives opens closes takes belongs means earn "
        "earns weigh weighs employed born can sleep sleeps wear wears stay stays staying resides teach teaches "
        "attend attends enjoy enjoys dislike dislikes adore adores manage manages sell sells located based lasts "
        "meets departs keeps believe commute spend spends"
    ),
    dates=_words(
        "monday tuesday wednesday thursday friday saturday sunday january february march april may june july august "
        "september october november december morning evening noon afternoon night midnight today tomorrow weekend "
        "spring summer autumn fall winter"
    ),
    numbers=_numbers(
        ""
        "two,three,four,five,six,seven,eight,nine,ten,eleven,twelve,thirteen,fourteen,fifteen,sixteen,seventeen,"
        "eighteen,nineteen,twenty"
    ),
    others=_words(
        "he she his her him they their them mother mom mum father dad parents sister brother sibling son daughter "
        "kids children uncle aunt cousin grandma grandpa grandmother grandfather friend friends colleague neighbour "
        "neighbor roommate wife husband girlfriend boyfriend partner niece nephew people someone everyone"
    ),
    addressed=_words("you your yours you're you've you'll you'd u"),
    own=_words("i i'm i've i'd i'll me my mine myself we we're we've we'd we'll us our ours"),
    unsettled=_words(
        "if whether unless would could should might maybe perhaps probably suppose assume guess hope wish reportedly "
        "allegedly"
    ),
    relatives=_words("which who whom whose"),
    additions=_words("also too additionally likewise"),
    vague=_words("it it's this that that's these those there here"),
    topics={
        RESIDENCE: _words("live lives lived living moved relocated reside home house flat apartment"),
        WORK: _words("work works working worked job employer employed company firm hired joined office profession"),
        NAMED: _words("called named renamed name"),
        FAVOURITE: _words("favourite favorite prefer prefers preferred"),
    },
    fillers=_words(
        "is are am i'm it's we're they're have has had i've we've can like likes love loves want wants need needs "
        "really definitely totally as very much also still already just even so too here there me my mine our us we "
        "i a an the of in on at to for from with by near close and or but month last next year week day days time "
        "ago get got getting put it this that these those be been being do does did make made go goes going thing "
        "things lot bit well oh hey yes yeah okay wow recently lately just dr mr mrs usually often always sometimes "
        "generally normally mostly actually after all every each enjoy enjoys any some right myself"
    ),
)
GERMAN = ClaimWords(
    negations=_words("nicht kein keine keinen keinem keiner nie niemals nichts ohne"),
    changes=_words(
        "umgezogen gezogen statt stattdessen anstatt geändert gewechselt gekündigt verlassen eingestellt angefangen "
        "aufgehört verkauft ersetzt umbenannt verschoben verlegt abgesagt gestiegen gesunken erhöht gesenkt geworden "
        "befördert verlegt umgestiegen beendet getrennt verheiratet geschieden reduziert verdoppelt gefallen "
        "ausgezogen eingezogen übergelaufen verzogen vertagt getauscht umgestellt verringert gestrichen wechselte "
        "zog"
    ),
    presents=_words("jetzt nun mehr inzwischen mittlerweile neuerdings seit seitdem kürzlich neulich aktuell wurde"),
    states=_words(
        "ist sind bin seid habe hat haben wohne wohnt wohnen lebe lebt leben arbeite arbeitet arbeiten kostet kosten "
        "besitze besitzt mag mögen liebe liebt hasse hasst bevorzuge will brauche braucht kenne nutze fahre fährt "
        "trinke trinkt esse isst spiele spielt rauche raucht spreche spricht studiere studiert miete zahle heißt "
        "heiße beginnt endet geht öffnet schließt gehört beträgt verdiene wiege angestellt kann schlafe trage laufe "
        "läuft liebsten findet liegt steht befindet dauert gilt bekomme bekommt erhalte lerne lernt unterrichte "
        "leite verdient gefällt schmeckt fliegt ankommt trinken essen nutzen nutzt benutze benutzt bleibe bleibt "
        "kaufe sammle reite singe male koche gehe lese schaue höre zahlen zahlt trägt treffe treffen finde hört "
        "besuche nehme nimmt vertrage vermiete"
    ),
    dates=_words(
        "montag dienstag mittwoch donnerstag freitag samstag sonnabend sonntag januar februar märz april mai juni "
        "juli august september oktober november dezember morgens abends mittags nachmittags nachts vormittags heute "
        "morgen abend mittag wochenende frühling frühjahr sommer herbst winter"
    ),
    numbers=_numbers("zwei,drei,vier,fünf,sechs,sieben,acht,neun,zehn,elf,zwölf"),
    others=_words(
        "er seine seiner seinen ihr ihre ihren sie mutter mama vater papa eltern schwester bruder geschwister sohn "
        "tochter kinder onkel tante cousin cousine oma opa großmutter großvater freund freundin freunde kollege "
        "kollegin nachbar nachbarin mitbewohner frau mann partner nichte neffe leute jemand"
    ),
    addressed=_words("du dein deine deinen dir dich euch euer eure"),
    own=_words("ich mein meine meinen meinem meiner meines mir mich wir unser unsere unseren unserem unserer uns"),
    unsettled=_words(
        "wenn falls ob würde würden könnte könnten sollte sollten vielleicht wahrscheinlich vermutlich hoffentlich "
        "hoffe angeblich anscheinend"
    ),
    relatives=_words("welche welcher welches welchem welchen dessen deren"),
    additions=_words("auch ebenfalls weiterhin außerdem zudem"),
    vague=_words("es dies dieses"),
    topics={
        RESIDENCE: _words(
            "wohne wohnt wohnen lebe lebt umgezogen gezogen wohnung haus zuhause umzug hause zieht ziehe wohnort"
        ),
        WORK: _words("arbeite arbeitet arbeit job stelle firma angestellt eingestellt beruf büro unternehmen"),
        NAMED: _words("heißt heiße name genannt umbenannt"),
        FAVOURITE: _words("liebsten bevorzuge lieber"),
    },
    compounds={"lieblings": FAVOURITE},
    fillers=_words(
        "ist sind bin seid hat haben kann mag mögen liebe will brauche wird werden wurde ich wir mein meine meinen "
        "meinem meiner unser unsere unseren mir mich uns der die das den dem des ein eine einen einem einer es in im "
        "an am auf aus bei beim bis für mit nach nahe von vom vor zu zum zur um und oder aber als auch noch schon "
        "sehr so da dort hier dass ob wie was wer wo wenn dann denn doch ja nein letzten letzte nächsten nächste "
        "monat jahr woche tag tage paar dr herr habe fast jeden jede meist meistens oft immer manchmal normalerweise "
        "gewöhnlich eigentlich liegt"
    ),
)
FRENCH = ClaimWords(
    negations=_words("ne n pas jamais plus aucun aucune rien sans"),
    changes=_words(
        "déménagé emménagé lieu plutôt changé remplacé quitté démissionné embauché embauchée commencé arrêté cessé "
        "vendu rebaptisé renommé reporté reportée décalé décalée déplacé annulé augmenté baissé monté diminué devenu "
        "devenue passé promu licencié terminé divorcé marié réduit doublé résilié avancé transféré déplacée vendue "
        "annulée changée remplacée reportés abandonné échangé divorcée mariée promue licenciée"
    ),
    presents=_words("maintenant désormais dorénavant plus depuis récemment actuellement dernièrement"),
    states=_words(
        "est sont suis ai a avons ont c'est j'ai habite habitons vis vit vivons travaille travaillons coûte coûtent "
        "possède aime aimons adore déteste préfère veux besoin connais utilise conduis bois boit mange joue fume "
        "parle étudie loue paie paye s'appelle m'appelle appelle commence finit part arrive ouvre ferme appartient "
        "gagne pèse employé employée peux dors porte aura loge loges réside séjourne dure vends enseigne dirige "
        "reçois reste restons prends fais vais lis regarde écoute collectionne marche chante cuisine tient situe "
        "situé située trouve termine commencent finissent partent ouvrent ferment buvons mangeons jouons parlons "
        "étudions"
    ),
    dates=_words(
        "lundi mardi mercredi jeudi vendredi samedi dimanche janvier février mars avril mai juin juillet août "
        "septembre octobre novembre décembre matin soir midi après-midi nuit minuit demain printemps été automne "
        "hiver"
    ),
    numbers=_numbers("deux,trois,quatre,cinq,six,sept,huit,neuf,dix,onze,douze"),
    others=_words(
        "il elle ils elles son sa ses leur leurs lui mère maman père papa parents sœur soeur frère fils fille "
        "enfants oncle tante cousin cousine grand-mère grand-père ami amie amis collègue voisin voisine colocataire "
        "femme mari copain copine gens quelqu'un"
    ),
    addressed=_words("tu ton ta tes toi vous votre vos t'as t'es"),
    own=_words("je j j'ai moi me m mon ma mes nous notre nos"),
    unsettled=_words(
        "si serait pourrait pourrais devrait devrais voudrais aimerais peut-être probablement sûrement suppose "
        "espère espérons apparemment"
    ),
    relatives=_words("qui que dont lequel laquelle"),
    additions=_words("aussi également"),
    vague=_words("ce c'est c ça cela ceci"),
    topics={
        RESIDENCE: _words(
            "habite j'habite vis vit déménagé emménagé appartement maison logement loge réside vivons habitons"
        ),
        WORK: _words("travaille travail poste emploi employé employée embauché embauchée entreprise société bureau"),
        NAMED: _words("s'appelle appelle rebaptisé renommé nom"),
        FAVOURITE: _words("préféré préférée préfère favori favorite"),
    },
    fillers=_words(
        "est sont suis ai a avons ont c'est j'ai aime aimons adore veux besoin peux je j nous mon ma mes notre nos "
        "me m moi on le la les l un une des du de d au aux à en dans sur sous chez par pour avec près et ou mais que "
        "qui quoi où comme si ce cet cette ces ça y se s très aussi encore déjà bien dernier dernière prochain "
        "prochaine mois an année semaine jour jours docteur presque tous toutes quelques être avoir fait souvent "
        "toujours parfois généralement normalement habituellement"
    ),
)
SPANISH = ClaimWords(
    negations=_words("no nunca jamás ni nada nadie ningún ninguna sin tampoco"),
    changes=_words(
        "mudé mudamos mudado trasladé trasladamos trasladado cambié cambiamos cambiado cambió dejé dejamos dejado "
        "renuncié contrató contrataron empecé empezamos vendí vendimos reemplacé sustituí renombramos aplazó "
        "aplazado pospone pospuso pospuesto retrasó canceló cancelado subió aumentó bajó volví convertí ascendieron "
        "despidieron terminé divorcié casé trasladó mudó pasó redujo duplicó vendió vendió cambiaron subieron "
        "bajaron aplazaron adelantó cancelaron reemplazó reemplazamos sustituyó abandoné quité trasladaron mudaron "
        "empezó retiré jubilé"
    ),
    presents=_words("ahora ya actualmente últimamente recientemente vez lugar desde"),
    states=_words(
        "es son soy está están estoy tengo tiene tenemos hay vivo vive vivimos trabajo trabaja trabajamos cuesta "
        "cuestan gusta gustan encanta encantan odio prefiero quiero necesito conozco uso conduzco bebo como juego "
        "toco fumo hablo estudio alquilo pago llama llamo empieza termina sale llega abre cierra pertenece gano peso "
        "empleado empleada puedo duermo llevo resido reside residimos dura queda quedo estudiamos enseño dirijo "
        "recibo cobro prefiere preferimos desayuno almuerzo ceno comemos bebemos nado corro canto cocino leo veo "
        "escucho colecciono cierran abren salen llegan empiezan terminan gana pesa sé sabe conoce usa usamos "
        "necesitamos queremos odiamos amo adoro detesto soporto"
    ),
    dates=_words(
        "lunes martes miércoles jueves viernes sábado domingo enero febrero marzo abril mayo junio julio agosto "
        "septiembre octubre noviembre diciembre mañana tarde noche mediodía medianoche primavera verano otoño "
        "invierno"
    ),
    numbers=_numbers("dos,tres,cuatro,cinco,seis,siete,ocho,nueve,diez,once,doce"),
    others=_words(
        "él ella ellos ellas su sus madre mamá padre papá padres hermana hermano hijo hija hijos tío tía primo prima "
        "abuela abuelo amigo amiga amigos compañero compañera vecino vecina esposa esposo marido mujer novio novia "
        "gente alguien"
    ),
    addressed=_words("tú tu tus ti te usted vosotros vuestro vuestra"),
    own=_words(
        "yo mi mis mí mío mía me nosotros nuestro nuestra nuestros nuestras nos conmigo soy somos estoy estamos "
        "tengo tenemos vivo vivimos trabajo trabajamos mudé mudamos trasladé trasladamos dejé dejamos cambié "
        "cambiamos renuncié empecé empezamos vendí vendimos reemplacé bebo fumo prefiero quiero necesito conozco "
        "conduzco juego toco hablo estudio duermo llevo puedo alquilo pago uso gano peso llamo odio hago compré "
        "volví resido residimos estudiamos enseño dirijo recibo cobro preferimos desayuno almuerzo ceno comemos "
        "bebemos nado corro canto cocino leo veo escucho colecciono usamos necesitamos queremos odiamos amo adoro "
        "detesto soporto abandoné retiré jubilé como encontré"
    ),
    unsettled=_words(
        "si quizá quizás ojalá sería podría podrían debería deberían gustaría probablemente seguramente supongo "
        "espero aparentemente supuestamente"
    ),
    relatives=_words("que quien quienes cuyo cuya cual"),
    additions=_words("también además"),
    vague=_words("esto eso ello"),
    topics={
        RESIDENCE: _words(
            "vivo vive vivimos mudé mudamos trasladé trasladamos piso apartamento casa resido reside residimos mudó "
            "trasladó"
        ),
        WORK: _words("trabajo trabaja puesto empleo empleado empleada contrató empresa oficina"),
        NAMED: _words("llama llamo nombre renombramos"),
        FAVOURITE: _words("favorito favorita prefiero preferido preferida"),
    },
    fillers=_words(
        "es son soy está están estoy tengo tiene tenemos hay gusta gustan encanta encantan quiero necesito puedo yo "
        "nosotros mi mis nuestro nuestra me nos el la los las lo un una unos unas de del a al en con por para cerca "
        "y o pero que quien qué cómo si este esta estos estas ese esa se le les muy también aún todavía bien pasado "
        "pasada próximo próxima mes año semana día días doctor casi todos todas algunos algunas ser fue era suelo "
        "siempre normalmente generalmente"
    ),
)
CHINESE = ClaimWords(
    negations=_words("不 没 别 无"),
    changes=_words(
        "改 搬 换 变成 变 辞职 离开 跳槽 聘用 停止 戒 卖 推迟 提前 取消 延期 涨 降 "
        "不再 关门 搬家 升职 改成 改名 离婚 结婚 转到 辞掉 卖掉 放弃 减少 增加 改为 "
        "换成 退休 毕业"
    ),
    presents=_words("现在 开始 以后 目前 最近 已经"),
    states=_words(
        "是 在 叫 有 住 喜欢 爱 讨厌 用 开 喝 吃 抽 说 学 租 每 要 当 起飞 上班 "
        "玩 拉 姓 需要 打 练 教 过敏 骑 看 听 唱 游 睡 花 付 养 做 认识 属于"
    ),
    dates=_words("星期 周末 早上 晚上 中午 下午 上午 明天 今天 春天 夏天 秋天 冬天"),
    numbers={
        "二": "2",
        "两": "2",
        "三": "3",
        "四": "4",
        "五": "5",
        "六": "6",
        "七": "7",
        "八": "8",
        "九": "9",
        "十": "10",
    },
    others=_words(
        "他 她 他们 她们 妈 爸 妈妈 爸爸 父母 姐姐 哥哥 妹妹 弟弟 儿子 女儿 孩子 "
        "叔叔 阿姨 表妹 表弟 表哥 表姐 奶奶 爷爷 朋友 同事 邻居 室友 老婆 老公 妻子 "
        "丈夫"
    ),
    addressed=_words("你 您 你们"),
    own=_words("我 我们 咱 咱们"),
    unsettled=_words("如果 要是 假如 是否 可能 也许 大概 或许 应该 希望 想要 据说 听说 好像"),
    relatives=_words(""),
    additions=_words("也"),
    vague=_words("这 那 它"),
    topics={
        RESIDENCE: _words("住 搬 公寓 房子 搬家"),
        WORK: _words("工作 上班 公司 职 聘用 当"),
        NAMED: _words("叫 名字 改名"),
        FAVOURITE: _words("喜欢 最爱"),
    },
    fillers=frozenset(
        "我们的了在是一个这那和与就都也很太有着过到去来从为把被给让上下里外边前后再时候月日号年天吧呢吗啊得地之其元块"
    ),
)
BY_LANGUAGE: Mapping[str, ClaimWords] = {
    "english": ENGLISH,
    "german": GERMAN,
    "french": FRENCH,
    "spanish": SPANISH,
}
"""By the name of a Snowball algorithm; CHINESE is chosen by the script."""
